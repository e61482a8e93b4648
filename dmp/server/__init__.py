"""The doors of a pool node: TCP connections and RDMA."""
