"""A disk of a few MiB, mounted for one test; skipped where mounting is not allowed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest


def fill(folder: Path) -> Path:
    """Take all that is free, however much others take meanwhile; answers the file that took it."""
    file = folder / "fill"
    with file.open("wb", buffering=0) as out, suppress(OSError):
        while out.write(bytes(4096)):
            pass
    return file


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
