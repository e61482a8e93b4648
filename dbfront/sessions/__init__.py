"""Conversations that the front keeps: items, turns, and where they are stored."""
