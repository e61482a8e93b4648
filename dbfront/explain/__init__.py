"""What EXPLAIN says of AI calls, and what they are estimated to take."""
