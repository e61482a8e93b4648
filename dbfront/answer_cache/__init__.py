"""The answer cache: answers to equal calls of earlier statements, in memory and in a database."""
