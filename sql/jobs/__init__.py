"""AI jobs in SQL: statements, batches, and the tables of jobs."""
