"""A miss in L1 becomes a load from L2, L3 or L4, or a recomputation; full blocks go to the pool."""
