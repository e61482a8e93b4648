"""The parts that processes are made of: front, compute node, pool node."""
