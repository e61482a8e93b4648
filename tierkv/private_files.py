"""Secrets in private files, so printed lines can name the file instead of the secret.

Called by tierkv/commands/up.py and tierkv/commands/connect.py. Each file is readable only by the
owner and is replaced as a whole: a reader sees the old text or the new text.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Final

TOKEN_FILE: Final = "cluster.token"
PASSWORD_FILE: Final = "pgpass"


def keep_token(run_dir: Path, token: str) -> Path:
    """Write the token of the cluster that runs from ``run_dir``; return the file."""
    return _keep(run_dir / TOKEN_FILE, token + "\n")


def find_token(run_dir: Path, token: str) -> Path:
    """Return a file with a token; a separate file if ``run_dir`` belongs to another cluster."""
    with contextlib.suppress(OSError):
        if (run_dir / TOKEN_FILE).read_text().strip() == token:
            return run_dir / TOKEN_FILE
    name = hashlib.sha256(token.encode()).hexdigest()[:8]
    return _keep(run_dir / f"{name}.token", token + "\n")


def keep_passwords(run_dir: Path, users: dict[str, str]) -> Path:
    r"""Write passwords of SQL users in libpq's ``passfile`` format: ``:`` and ``\`` escaped."""
    lines = (f"*:*:*:{_escaped(user)}:{_escaped(word)}\n" for user, word in users.items())
    return _keep(run_dir / PASSWORD_FILE, "".join(lines))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace(":", "\\:")


def _keep(file: Path, text: str) -> Path:
    with contextlib.suppress(OSError):
        if file.read_text() == text and file.stat().st_mode & 0o077 == 0:
            return file
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    number, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    with os.fdopen(number, "w") as stream:
        stream.write(text)
    os.replace(name, file)
    return file
