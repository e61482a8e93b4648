"""What statements and calls cost: log, trace and statistics."""
