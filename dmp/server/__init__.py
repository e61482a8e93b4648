"""The servers of a pool node: TCP connections and RDMA."""
