"""Docstrings and docs name files that exist, and docstrings callers that import the module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = sorted(link.name for link in (ROOT / "tierkv").iterdir() if link.is_symlink())
MODULES = sorted(
    path
    for room in (*ROOMS, "tierkv", "bench")
    for path in (ROOT / room).rglob("*.py")
    if "_pb2" not in path.name
)
FILE = re.compile(r"(?<![\w./*<-])((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b")
FOLDER = re.compile(rf"(?<![\w./])((?:{'|'.join(ROOMS)}|tierkv)/[a-z_/0-9]*)(?=`)")
CLAIM = re.compile(r"\b(?:[Cc]alled|[Uu]sed) (?:only )?by ([^.;:]*(?:\.py\b[^.;:]*)*)")


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def _found(name: str, module: Path) -> list[Path]:
    """Files of ours that ``name`` may mean, written in ``module``."""
    if "/" not in name:
        return [path for path in MODULES if path.name == name]
    folders = (ROOT, *module.parents)
    return [folder / name for folder in folders if (folder / name).is_file()]


def _imports(path: Path) -> set[str]:
    """Return all modules and names that a file imports, dotted."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] in ("tierkv", "bench") else ("tierkv", *parts))


def test_files_that_docstrings_name_exist() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in MODULES
        for name in FILE.findall(_docstring(path))
        if not _found(name, path)
    ]
    assert not missing, "\n".join(missing)


def test_callers_that_docstrings_name_import_the_module() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in MODULES
        for claim in CLAIM.findall(_docstring(path))
        for name in FILE.findall(claim.partition(" in place of ")[0])
        if not any(_dotted(path) in _imports(caller) for caller in _found(name, path))
    ]
    assert not wrong, "\n".join(wrong)


def test_files_and_folders_that_docs_name_exist() -> None:
    missing = [
        f"{page.name}: {name}"
        for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
        for quoted in re.findall(r"`[^`\n]+`", page.read_text())
        for name in (*FILE.findall(quoted), *FOLDER.findall(quoted))
        if not any(ROOT.glob(name) if "/" in name else ROOT.glob(f"*/**/{name}"))
    ]
    assert not missing, "\n".join(missing)
