"""KV events from the caches of foreign engines, reported to the directory."""
