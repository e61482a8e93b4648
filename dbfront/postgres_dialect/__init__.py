"""What PostgreSQL clients ask the catalog and the settings, answered over DuckDB."""
