"""Routers of the simulated cluster: our scheduler, and routers to compare with."""
