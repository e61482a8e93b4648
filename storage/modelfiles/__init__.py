"""Model folders in Hugging Face layout."""
