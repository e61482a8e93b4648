"""What vLLM loads: a tier of its offloading, and a connector of its own."""
