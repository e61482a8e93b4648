"""Limits of AI calls: buckets of requests and tokens, and the gate that admits calls."""
