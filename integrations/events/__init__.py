"""What other engines say of their own caches, for the directory."""
