"""What is worth keeping: eviction and admission as pure cores, for every cache and the simulator."""
