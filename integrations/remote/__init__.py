"""Compute nodes that use a foreign engine over HTTP."""
