"""AI jobs: a statement over many rows, run batch by batch; any process may be lost."""
