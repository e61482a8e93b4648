"""Rules that rewrite PostgreSQL's spellings as DuckDB's."""
