"""Text to token ids and back: tokenizers, chat templates, prompts in chunks."""
