"""Anthropic's Messages API over the same calls as OpenAI's."""
