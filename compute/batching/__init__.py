"""Continuous batching: sequences, their pages of KV in L1, and what each step computes."""
