"""Plans of statements: the texts for the engine."""
