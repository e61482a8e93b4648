"""PostgreSQL behind the door: a relay that passes bytes on and answers AI calls itself."""
