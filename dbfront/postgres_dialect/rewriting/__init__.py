"""Rules that turn PostgreSQL's spellings into DuckDB's."""
