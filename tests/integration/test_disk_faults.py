"""A failing disk under the disk tier: system calls of a real process made to fail with strace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]

SCRIPT = """
import hashlib, logging, os, sys
from pathlib import Path
from tierkv.kvcore.block import ROOT_PARENT
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import CacheError
from tierkv.kvcore.block import BlockSpec, Owner, RangeShape
from tierkv.storage.disk.segment_store import SegmentStore

logging.basicConfig(level=logging.INFO, format="LOG %(message)s")
SIZE, FILE = 12000, 4096 * 17
clock = ManualClock()
store = SegmentStore(
    Path(sys.argv[1]), capacity_bytes=4 * FILE, segment_bytes=FILE, clock=clock, io_threads=1
)

def key(name):
    return hashlib.blake2b(name.encode(), digest_size=16).digest()

def data(name):
    return (key(name) * SIZE)[:SIZE]

def put(name):
    try:
        block = BlockSpec(key(name), ROOT_PARENT, 64, RangeShape(SIZE, 1), Owner("m", "t"))
        store.put(block, memoryview(data(name)))
        return "ok"
    except CacheError as error:
        return error.code

def get(name):
    buffer = bytearray(SIZE)
    try:
        store.get_block(key(name), memoryview(buffer))
    except CacheError as error:
        return error.code
    assert bytes(buffer) == data(name), "wrong bytes"
    return "ok"

def say(*words):
    print(*words, flush=True)

"""


@pytest.fixture(autouse=True)
def strace_works() -> None:
    if shutil.which("strace") is None:
        pytest.skip("no strace here: deploy/install-test-packages.sh installs it")
    probe = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"strace may not trace here: {probe.stderr.decode().strip()}")


def run(folder: Path, inject: str, steps: str) -> list[str]:
    """Run steps with system calls failing as strace's ``inject`` says; return what they print."""
    command = [
        "strace", "-f", "-qq", "-o", os.devnull, "-e", f"inject={inject}",
        sys.executable, "-c", SCRIPT + steps, str(folder),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    logs = [line for line in done.stderr.splitlines() if line.startswith("LOG")]
    return done.stdout.splitlines() + logs


def test_a_write_error_gives_the_file_up_and_goes_on_in_the_next(tmp_path: Path) -> None:
    # Writes: 1 file page, 2 record a, 3 record b (fails), 4 its burial, 5 file page, ...
    lines = run(
        tmp_path / "l4",
        "pwritev,pwritev2:error=EIO:when=3",
        """
say(put("a"), put("b"), get("a"), get("b"), put("b"), get("b"))
say(store.stats().io_errors, repr(store.stats().degraded))
for i in range(30):
    assert put(f"n{i}") == "ok" and get(f"n{i}") == "ok"
store.close()
""",
    )
    assert lines[0] == "ok transport_error ok block_not_found ok ok"
    assert lines[1] == "1 ''"
    assert sum("given up" in line for line in lines) == 1
    assert (tmp_path / "l4" / "segment-00000.bad").exists()


@pytest.mark.parametrize(("errno", "code"), [("ENOSPC", "pool_full"), ("EROFS", "transport_error")])
def test_a_full_or_read_only_disk_degrades_and_recovers(
    tmp_path: Path, errno: str, code: str
) -> None:
    # Writes 3 to 6 fail: record b, its burial, and the same for the trial after 30 s.
    lines = run(
        tmp_path / "l4",
        f"pwritev,pwritev2:error={errno}:when=3..6",
        """
say(put("a"), put("b"), get("a"))
say(put("c"), bool(store.stats().degraded), store.stats().io_errors)
clock.advance(31)
say(put("d"), put("e"), store.stats().io_errors)
clock.advance(31)
say(put("f"), get("f"), get("a"), repr(store.stats().degraded))
store.close()
""",
    )
    assert lines[:4] == [f"ok {code} ok", f"{code} True 1", f"{code} {code} 2", "ok ok ok ''"]
    assert sum("takes no blocks" in line for line in lines) == 1
    assert sum("takes blocks again" in line for line in lines) == 1


def test_a_failed_sync_gives_the_file_up_and_its_blocks_stay_readable(tmp_path: Path) -> None:
    lines = run(
        tmp_path / "l4",
        "fdatasync:error=EIO:when=1",
        """
for i in range(5):
    assert put(f"n{i}") == "ok"
say(*[get(f"n{i}") for i in range(5)])
for i in range(30):
    assert put(f"m{i}") == "ok" and get(f"m{i}") == "ok"
say(get("n0"))
store.close()
""",
    )
    assert lines[0] == "ok ok ok ok ok"
    assert lines[1] == "block_not_found"
    assert sum("given up" in line for line in lines) == 1
    assert (tmp_path / "l4" / "segment-00000.bad").exists()


def test_a_read_error_is_a_miss_and_the_block_is_dropped(tmp_path: Path) -> None:
    # Reads at open: one for each of four new files, to try direct I/O.
    lines = run(
        tmp_path / "l4",
        "preadv,preadv2:error=EIO:when=5",
        """
say(put("a"), put("b"), get("a"), get("a"), get("b"), put("a"), get("a"))
store.close()
""",
    )
    assert lines[0] == "ok ok transport_error block_not_found ok ok ok"


def test_when_every_write_fails_puts_are_refused_and_reads_go_on(tmp_path: Path) -> None:
    lines = run(
        tmp_path / "l4",
        "pwritev,pwritev2:error=EIO:when=3+",
        """
say(put("a"), *[put(f"n{i}") for i in range(6)], get("a"))
say(bool(store.stats().degraded))
store.close()
""",
    )
    words = lines[0].split()
    assert words[0] == words[-1] == "ok" and "ok" not in words[1:-1]
    assert lines[1] == "True"
    assert sum("takes no blocks" in line for line in lines) == 1
