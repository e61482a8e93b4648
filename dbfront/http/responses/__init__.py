"""OpenAI's Responses and Conversations: bodies, events, runs and endpoints."""
