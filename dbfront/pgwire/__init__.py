"""PostgreSQL's wire protocol: messages without I/O, the conversation with clients, the server."""
