"""Bytes between client, relay and PostgreSQL: frames, log-in, exchanges."""
