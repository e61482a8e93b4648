"""TierKV as a wheel: it takes one name of site-packages, and works beside packages named as rooms.

Rooms stand at the top of the tree. A wheel that installed them there broke every project with a
package ``scheduler`` or ``storage`` of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = sorted(path.name for path in (ROOT / "tierkv").iterdir() if path.is_symlink())
ASK = """
import scheduler, sql, storage, tierkv
assert scheduler.MINE and sql.MINE and storage.MINE
print(tierkv.__file__)
with tierkv.connect() as db:
    note = "Customer: Jonas Ortiz. Product: blender. City: Vienna."
    question = "\\nQuestion: Where does the customer live?"
    print(db.execute("SELECT ai_generate(? || ?)", [note, question]).fetchall())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel of the tree's tracked files, as a clean checkout has them."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        source, target = ROOT / name, folder / "tree" / name
        if name.startswith(("tests/", "bench/", "docs/")) or not os.path.lexists(source):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(folder), str(folder / "tree")], check=True)
    (made,) = folder.glob("tierkv-*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment of its own, which borrows what the wheel requires."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    subprocess.run([*command, str(wheel)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return python


def test_a_wheel_takes_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"tierkv"}
    assert ROOMS and all(f"tierkv/{room}/__init__.py" in names for room in ROOMS)


def test_it_answers_beside_packages_named_as_rooms(python: Path, tmp_path: Path) -> None:
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("MINE = True\n")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), "-c", ASK], cwd=tmp_path, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    file, answer = done.stdout.strip().splitlines()[-2:]
    assert Path(file).is_relative_to(python.parents[1]) and "Vienna" in answer


def test_the_command_is_installed(python: Path, tmp_path: Path) -> None:
    command = [
        str(python.with_name("tierkv")),
        "sql",
        "--format",
        "csv",
        "-c",
        "SELECT 41 + 1 AS n",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.split() == ["n", "42"], done.stderr
