"""Sessions with PostgreSQL's statements that DuckDB lacks."""
