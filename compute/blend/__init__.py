"""Blending: a prompt's KV put together from chunks computed elsewhere, a share of it anew."""
