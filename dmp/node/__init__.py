"""A pool node: puts, gets, reports, and work in the background."""
