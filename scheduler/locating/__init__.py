"""Questions to the directory: where the blocks of a prompt are."""
