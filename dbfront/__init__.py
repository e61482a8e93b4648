"""The front: PostgreSQL wire, HTTP, the executor, relational engines, tokenizers."""
