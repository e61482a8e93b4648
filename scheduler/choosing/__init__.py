"""Which node gets a request: one cost in seconds per candidate."""
