"""What the project's developers run from a checkout; nothing here is installed."""
