"""Eviction and admission as pure cores, for caches and the simulator."""
