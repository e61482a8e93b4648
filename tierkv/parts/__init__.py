"""The parts of processes: front, compute node, pool node."""
