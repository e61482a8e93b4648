"""PostgreSQL's types: OIDs, text and binary formats, parameters."""
