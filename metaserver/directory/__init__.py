"""Location of every block: tables in columns, leases, and events from nodes."""
