"""The conversation of one client: simple and extended queries, portals."""
