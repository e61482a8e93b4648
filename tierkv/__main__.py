"""``python -m tierkv`` is the same as the ``tierkv`` command."""

from tierkv.cli import main

main()
