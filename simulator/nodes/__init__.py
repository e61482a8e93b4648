"""Nodes, pool and links of the simulated cluster."""
