"""Plans of statements: the node and time of each call."""
