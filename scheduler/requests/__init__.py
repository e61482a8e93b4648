"""Live requests: their phases, retries and answers."""
