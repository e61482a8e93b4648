"""PostgreSQL wire protocol: codec, session, server, catalog."""
