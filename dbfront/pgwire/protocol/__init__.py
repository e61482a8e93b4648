"""PostgreSQL's wire protocol without I/O: messages, log-in, replies, errors."""
