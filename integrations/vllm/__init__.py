"""The connector to the pool for vLLM."""
