"""Compute nodes whose engine is somebody else's, spoken to over HTTP."""
