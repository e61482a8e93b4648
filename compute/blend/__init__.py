"""Blending: a prompt's KV from chunks computed elsewhere, with a share of the tokens recomputed."""
