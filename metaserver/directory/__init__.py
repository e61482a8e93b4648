"""Where every block is: tables in columns, leases, and news from nodes."""
