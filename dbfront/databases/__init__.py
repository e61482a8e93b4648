"""Relational engines behind the executor."""
