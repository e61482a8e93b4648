"""Where every block is: a soft-state directory fed by nodes, and durable namespaces."""
