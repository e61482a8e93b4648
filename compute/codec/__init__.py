"""Codecs that shrink KV on the way out of L1: one Protocol and its implementations."""
