"""Sessions that speak PostgreSQL where DuckDB stops."""
