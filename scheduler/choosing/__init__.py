"""Choice of a node for a request: one cost in seconds per candidate."""
