"""SQL text: tokens, literals, statements, clauses."""
