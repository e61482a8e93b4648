"""Which slot holds which block: the pure core of a pool node, and who is evicted."""
