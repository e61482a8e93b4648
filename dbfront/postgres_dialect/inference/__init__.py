"""Types of undeclared parameters, as PostgreSQL would infer the types."""
