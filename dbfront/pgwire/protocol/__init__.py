"""PostgreSQL's wire protocol without I/O: messages, login, replies, errors."""
