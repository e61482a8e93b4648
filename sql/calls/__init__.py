"""AI calls in SQL: found, checked, and placed in their statement."""
