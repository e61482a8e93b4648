"""Developer tools, run from a checkout; the package is not installed."""
