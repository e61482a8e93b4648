"""How each AI function is answered: what goes to a model, and what becomes of its answers."""
