"""The segment file: memory for blocks that outlives its process."""
