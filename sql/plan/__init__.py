"""Plans of statements: the texts that the engine will run."""
