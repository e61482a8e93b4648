"""L1 misses become loads from L2, L3 or L4, or recomputation; full blocks go to the pool."""
