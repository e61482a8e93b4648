"""Statements with AI calls on PostgreSQL."""
