"""docs/journey.md tells the main job with names that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`([a-z_/0-9]+\.py)::([A-Za-z_.]+)`")
FILES = re.compile(
    r"`((?:compute|costing|dbfront|dmp|integrations|kvcore|kvwire|metaserver|policies|scheduler"
    r"|simulator|sql|storage|tierkv|bench|tests)/[a-z_/0-9]+\.py)`"
)
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def _names(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef))
            }
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_functions_named_in_docs_exist(page: Path) -> None:
    text = page.read_text()
    for name in FILES.findall(text):
        assert (ROOT / name).is_file(), f"{page.name} names {name}, which does not exist"
    for name, function in NAMED.findall(text):
        assert function in _names(ROOT / name), f"{page.name}: no {function} in {name}"


def test_journey_names_its_three_hops() -> None:
    text = (ROOT / "docs/journey.md").read_text()
    hops = ("dbfront/statement/executor.py::", "scheduler/dispatcher.py::", "compute/node.py::")
    assert all(hop in text for hop in hops)


def test_journey_names_few_functions() -> None:
    assert len(set(NAMED.findall((ROOT / "docs/journey.md").read_text()))) <= 15


def test_architecture_lists_every_package() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    rooms = [link.resolve() for link in (ROOT / "tierkv").iterdir() if link.is_symlink()]
    packages = {
        f"{package.parent.relative_to(ROOT)}/"
        for room in (*rooms, ROOT / "tierkv")
        for package in room.glob("*/__init__.py")
        if not package.parent.is_symlink()
    }
    assert {package for package in packages if f"`{package}`" not in page} == set()


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_index_lists_every_page_and_the_readme_is_short() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()
    assert len((ROOT / "README.md").read_text().splitlines()) <= 80
