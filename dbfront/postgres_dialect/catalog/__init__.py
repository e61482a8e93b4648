"""PostgreSQL's catalog as tables and functions in DuckDB."""
