"""The connector to the pool that vLLM loads."""
