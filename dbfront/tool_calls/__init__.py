"""Function tools of a conversation: what a model may call, how it writes a call, how to read it."""
