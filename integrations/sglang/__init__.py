"""The storage backend that SGLang loads for its hierarchical cache."""
