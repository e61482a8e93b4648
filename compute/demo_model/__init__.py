"""A small trained model, shipped with the project, and the synthetic data for its training."""
