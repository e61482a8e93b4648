"""The cost of statements and calls: log, trace and statistics."""
