"""Eviction policies to compare production's with: plain ones, and published ones as described."""
