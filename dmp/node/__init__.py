"""A pool node: puts, gets, reports, and background work."""
