"""Files of clusters on this machine: state and secrets in run_dir, and memory of stopped clusters.

Called by ``tierkv up`` (at start and end), ``tierkv serve``, ``tierkv status``, ``tierkv doctor``,
``tierkv connect`` and ``tierkv pool clean``. A clean stop keeps the pool's sealed blocks in the
pool's folder for the next start. Secrets lie in private files, so printed lines can name the file
instead of the secret: each file is readable only by the owner and is replaced as a whole, hence a
reader sees the old text or the new text. The home of a node distinguishes a restart from another
process with the same name; the meta server compares homes (metaserver/state.py). This module
imports few other parts of TierKV, so read-only commands stay quick.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import socket
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

import typer

from tierkv.dmp.segment.segment_place import is_memory, memory_available, read_owner
from tierkv.kvcore.errors import ConfigError
from tierkv.settings import Settings

STATE_FILE: Final = "cluster.json"
CONFIG_FILE: Final = "cluster.toml"


def segment_prefix(run_dir: Path) -> str:
    """Return the prefix of a cluster's segments, derived from the run directory."""
    cluster = blake2b(str(run_dir.expanduser().resolve()).encode(), digest_size=4).hexdigest()
    return f"tierkv-{cluster}-"


CURE = "tierkv pool clean"


@dataclass(frozen=True, slots=True)
class LeftSegment:
    """A segment file that no process owns.

    Attributes:
        path: the file.
        held_bytes: memory taken by the file.
        owner: folder of the file's cluster; None if the file does not say.
        mine: True if the segment belongs to the cluster in question.
    """

    path: Path
    held_bytes: int
    owner: Path | None
    mine: bool

    @property
    def orphaned(self) -> bool:
        """True for a segment of no further use: damaged, or the cluster's folder is gone."""
        if self.path.suffix != ".seg":
            return True
        return self.owner is not None and not self.owner.is_dir()


def left_segments(settings: Settings) -> list[LeftSegment]:
    """Return this user's segments that no running process owns, sorted by name."""
    folder = Path(settings.dmp.segment_dir)
    mine = segment_prefix(settings.cluster.run_dir)
    found = (_look(path, mine) for path in sorted(folder.glob("tierkv-*.seg*")))
    return [segment for segment in found if segment is not None]


def clean(settings: Settings) -> None:
    """Remove orphaned segments and this cluster's segments; print names and sizes."""
    freed = 0
    for segment in left_segments(settings):
        if segment.mine or segment.orphaned:
            segment.path.unlink(missing_ok=True)
            freed += segment.held_bytes
            typer.echo(f"removed {segment.path}: {mebibytes(segment.held_bytes)}")
        else:
            whose = (
                f"of {segment.owner}" if segment.owner else f"remove it by hand: rm {segment.path}"
            )
            typer.echo(f"kept {segment.path}: {mebibytes(segment.held_bytes)}, {whose}")
    typer.echo(f"{mebibytes(freed)} freed; a running cluster's memory is not touched")


def orphans_text(settings: Settings) -> str:
    """Describe the orphaned segments; empty if none."""
    orphans = [segment for segment in left_segments(settings) if segment.orphaned]
    if not orphans:
        return ""
    total = mebibytes(sum(segment.held_bytes for segment in orphans))
    names = ", ".join(segment.path.name for segment in orphans[:5])
    more = f" and {len(orphans) - 5} more" if len(orphans) > 5 else ""
    return f"{total} in {settings.dmp.segment_dir} of clusters that are gone: {names}{more}"


def kept_text(settings: Settings) -> str:
    """Describe the memory kept by a stopped cluster: size, files, and the command that frees it."""
    kept = [segment for segment in left_segments(settings) if segment.mine]
    if not kept:
        return "no KV stays in memory"
    total = mebibytes(sum(segment.held_bytes for segment in kept))
    names = ", ".join(str(segment.path) for segment in kept)
    if settings.cluster.run_dir.expanduser() == type(settings.cluster)().run_dir.expanduser():
        command = CURE
    else:
        command = f"{CURE} --set cluster.run_dir={settings.cluster.run_dir}"
    return f"{total} of KV stay in memory for the next start: {names}\n  `{command}` frees it"


def require_memory(settings: Settings, nodes: int) -> None:
    """Refuse to start pool nodes if memory is insufficient.

    Raises:
        ConfigError: names the needed and the available memory.
    """
    folder = Path(settings.dmp.segment_dir)
    available = memory_available() if folder.is_dir() and is_memory(folder) else None
    held = sum(segment.held_bytes for segment in left_segments(settings) if segment.mine)
    wanted = nodes * int(settings.dmp.capacity) - held
    if available is not None and wanted > available:
        raise ConfigError(
            f"the memory pool may need {mebibytes(wanted)} more, but only {mebibytes(available)} "
            "of memory are available",
            hint=f"Lower dmp.capacity, or free the memory of stopped clusters with `{CURE}`.",
        )


def mebibytes(size: int) -> str:
    """Return a size as text."""
    return f"{size / (1 << 20):.0f} MiB"


def _look(path: Path, mine: str) -> LeftSegment | None:
    """Return the facts about a file; None if in use, another user's, or gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            return None
        held = found.st_blocks * 512
        owner = read_owner(fd)
        return LeftSegment(path, held, Path(owner) if owner else None, path.name.startswith(mine))
    except OSError:
        return None
    finally:
        os.close(fd)


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


_MACHINE_ID: Final = Path("/etc/machine-id")
_HOME_BYTES: Final = 16


def claim_home(folder: Path, name: str, stack: AsyncExitStack) -> str:
    """Return the home of a node in a folder; a new home if another process has the lock.

    Only one process at a time has a home: a lock on a file ensures this, and the kernel frees the
    lock however the process ends. The home is a random number, which the folder keeps in
    ``NAME.home``.
    """
    fresh = secrets.token_hex(_HOME_BYTES)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(folder / f"{name}.home", flags, 0o600)
        stack.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        known = os.pread(fd, 2 * _HOME_BYTES, 0).decode(errors="replace")
        if re.fullmatch(rf"[0-9a-f]{{{2 * _HOME_BYTES}}}", known):
            return known
        os.pwrite(fd, fresh.encode(), 0)
    except OSError:
        pass  # The next start has another home, and waits for the end of this process.
    return fresh


def segment_home(path: Path) -> str:
    """Return the home of a pool node: its segment, which has one owner, on this machine."""
    try:
        machine = _MACHINE_ID.read_text().strip()
    except OSError:
        machine = ""
    text = "\0".join((machine, socket.gethostname(), str(path.resolve())))
    return blake2b(text.encode(), digest_size=_HOME_BYTES).hexdigest()
