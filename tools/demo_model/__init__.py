"""Training and evaluation of the demo model: run from a checkout, not installed."""
