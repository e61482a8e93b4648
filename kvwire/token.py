"""The cluster token: shown to peers by every process, and checked by the peers.

A token is a text, or a file whose lines may change while processes run. The first line is shown,
and all lines are accepted. To rotate: add the new token as a second line everywhere, then make it
the first line everywhere, then remove the old line.
"""

from __future__ import annotations

import hmac
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from tierkv.kvcore.errors import ConfigError

LOOK_S: Final = 1.0
"""Time between two looks at a file."""

MAX_TOKENS: Final = 8


class TokenFile:
    """A file with a token per line; empty lines and lines that begin with # do not count."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ConfigError: it can't be read, or has no token or too many.
        """
        self._path = path
        self._looked_s = time.monotonic()
        self._stamp = (0, 0)
        self._tokens = self._read()

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens as of the last second; the earlier ones while the file can't be used."""
        now = time.monotonic()
        if now - self._looked_s >= LOOK_S:
            self._looked_s = now
            with suppress(ConfigError):  # A file that is being replaced; the next look finds it.
                self._tokens = self._read()
        return self._tokens

    def _read(self) -> tuple[str, ...]:
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp == self._stamp:
                return self._tokens
            lines = [line.strip() for line in self._path.read_text("ascii").splitlines()]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cluster.token_file {self._path} can't be read: {error}",
                hint="Give a file with a token per line.",
            ) from None
        tokens = tuple(line for line in lines if line and not line.startswith("#"))
        if not 0 < len(tokens) <= MAX_TOKENS:
            raise ConfigError(
                f"cluster.token_file {self._path} has {len(tokens)} tokens, not 1 to {MAX_TOKENS}"
            )
        self._stamp = stamp
        return tokens


ClusterToken = str | TokenFile
"""A token as the caller has it; None stands for no token."""


def shown(token: ClusterToken | None) -> str:
    """Return what to show a peer; empty without a token."""
    return token.tokens[0] if isinstance(token, TokenFile) else token or ""


def accepts(token: ClusterToken | None, given: str) -> bool:
    """Return whether a peer showed the right token, in constant time per token."""
    wanted = token.tokens if isinstance(token, TokenFile) else (token or "",)
    right = [hmac.compare_digest(given.encode(), each.encode()) for each in wanted]
    return any(right)
