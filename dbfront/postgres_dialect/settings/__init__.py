"""SET, SHOW and RESET of PostgreSQL's settings."""
