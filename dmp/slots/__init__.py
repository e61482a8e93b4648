"""Which slot holds which block, and which block is evicted: the pure core of a pool node."""
