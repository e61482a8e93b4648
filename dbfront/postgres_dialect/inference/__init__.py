"""Types of parameters that a client left open, as PostgreSQL would infer them."""
