"""Bytes between client, relay and PostgreSQL: frames, login, exchanges."""
