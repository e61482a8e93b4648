"""One-sided RDMA: devices, rails, lanes and links."""
