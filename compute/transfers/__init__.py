"""Loads, saves, prefetches and handoffs of sequences, between the batcher and the tiers."""
