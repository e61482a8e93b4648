"""AI calls of a statement: evaluated in waves, in an order that shares prefixes."""
