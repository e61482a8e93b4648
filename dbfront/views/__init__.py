"""Rows of the admin views."""
