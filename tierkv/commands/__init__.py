"""The verbs of the ``tierkv`` command."""
