"""What SGLang loads: a storage backend of its hierarchical cache."""
