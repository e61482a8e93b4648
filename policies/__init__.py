"""What is worth keeping: eviction and admission as pure cores, for caches and simulator."""
