"""Traces replayed in virtual time through the same pure cores as in production."""
