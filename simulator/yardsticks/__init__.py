"""What production's eviction policies are compared with: plain and published ones, the optimum."""
