"""The door: PostgreSQL wire, HTTP, the executor, relational engines, tokenizer."""
