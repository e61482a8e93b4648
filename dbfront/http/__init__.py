"""REST: OpenAI-compatible endpoints, health and metrics."""
