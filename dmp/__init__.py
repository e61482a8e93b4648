"""Remote DRAM: segments, slots, transports and the node server; bytes only."""
