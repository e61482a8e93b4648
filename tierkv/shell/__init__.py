"""``tierkv sql``: the interactive shell."""
