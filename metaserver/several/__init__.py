"""One directory on several meta servers: who owns a block, and a client that asks the owners."""
