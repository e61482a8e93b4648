"""PostgreSQL behind the front: a relay for all bytes, with its own answers to AI calls."""
