"""Continuous batching: sequences, their KV pages in L1, and the choice of each step's tokens."""
