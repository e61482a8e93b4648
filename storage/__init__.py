"""Files at rest: L4 blocks and model weight files."""
