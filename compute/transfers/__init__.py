"""Loads and saves of sequences: what runs, what waits for it, and what is handed over."""
