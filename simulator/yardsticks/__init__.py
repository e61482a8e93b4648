"""Yardsticks for production's eviction policies: plain and published policies, and the optimum."""
