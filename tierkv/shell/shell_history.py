"""What was typed at the prompt of ``tierkv sql``, kept from one session to the next.

One entry is a whole statement, of any number of lines. The file is its owner's alone and bounded;
statements that may hold a secret are remembered for the session and not written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from prompt_toolkit.history import FileHistory

MAX_ENTRIES: Final = 2_000
MAX_ENTRY_CHARS: Final = 32_768
"""Longer statements were pasted or generated; they are remembered for the session."""

_SECRET: Final = re.compile(
    r"passw(or)?d|passphrase|\b(pwd|secret|token|credentials?|api_?key|private_?key)\b"
    r"|://[^/\s:@]*:[^/\s@]+@",
    re.IGNORECASE,
)


class StatementHistory(FileHistory):
    """prompt_toolkit's history file, private and bounded.

    A file that can't be written is given up: the session goes on with what it remembers.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file, and drop its oldest entries where there are too many.

        Raises:
            OSError: the file can't be made or read.
        """
        super().__init__(str(path))
        self._path = path
        self._writes = True
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        path.chmod(0o600)
        self._bound()

    def store_string(self, string: str) -> None:
        """Append an entry to the file, unless it may hold a secret or is very long."""
        if not self._writes or len(string) > MAX_ENTRY_CHARS or holds_secret(string):
            return
        try:
            super().store_string(string)
        except OSError:
            self._writes = False

    def _bound(self) -> None:
        newest_first = list(self.load_history_strings())
        if len(newest_first) <= MAX_ENTRIES:
            return
        self._replace(reversed(newest_first[: MAX_ENTRIES // 2]))

    def _replace(self, entries: Iterable[str]) -> None:
        """Write all entries anew; another session that appends meanwhile may lose an entry."""
        path, whole = self._path, self._path.with_name(f"{self._path.name}.{os.getpid()}")
        os.close(os.open(whole, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
        self.filename = str(whole)
        for entry in entries:
            super().store_string(entry)
        self.filename = str(path)
        whole.replace(path)


def holds_secret(statement: str) -> bool:
    """Say whether a statement may hold a password, a key or a token."""
    return _SECRET.search(statement) is not None
