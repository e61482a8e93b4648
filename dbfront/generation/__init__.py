"""Text in, text out: every AI call reaches the scheduler through this package."""
