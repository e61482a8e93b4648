"""Routers of the simulated cluster: ours, and those to compare with."""
