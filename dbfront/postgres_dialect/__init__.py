"""PostgreSQL's SQL, catalog and settings over DuckDB."""
