"""EXPLAIN of AI calls, and estimates of their cost."""
