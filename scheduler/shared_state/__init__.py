"""What the fronts of a cluster share, and how: embedded for one front, Valkey for several."""
