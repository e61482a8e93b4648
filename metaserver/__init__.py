"""Location of every block: a soft-state directory fed by nodes, and durable namespaces."""
