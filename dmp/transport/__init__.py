"""Ways to move bytes between a segment and a reader: in process, shared memory, TCP, RDMA."""
