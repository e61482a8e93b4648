"""Measures of the product's code: packages, import chains, class names, forwarding, language.

Pure reading of the tree with ``ast``; tests/house/test_shape.py holds each measure to a bound.
Run ``python -m tests.house.shape`` to print them all.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = sorted(path.name for path in (ROOT / "tierkv").iterdir() if path.is_symlink())
_WORDS = """
    it its itself that those these what who whom whose whoever one ones other others so some none
    nobody somebody anybody everybody such there they them their theirs
"""
PRONOUNS = frozenset(_WORDS.split())
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of each module by dotted name; ``__init__`` and generated code not."""
    found = {}
    for room in [*ROOMS, "tierkv"]:
        for path in sorted((ROOT / room).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if path.stem == "__init__" or "_pb2" in path.stem or path.parent.is_symlink():
                continue
            name = ".".join(parts if room == "tierkv" else ("tierkv", *parts))
            found[name] = ast.parse(path.read_text())
    return found


def room_of(module: str) -> str:
    """Return the room of a module; what composes the rooms counts as the room ``tierkv``."""
    first = module.split(".")[1]
    return first if first in ROOMS else "tierkv"


@cache
def imports() -> dict[str, set[str]]:
    """Return which of our modules each module imports, whether at its top or later."""
    known, found = modules(), defaultdict(set)
    for name, tree in known.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                asked = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
            elif isinstance(node, ast.Import):
                asked = [each.name for each in node.names]
            else:
                continue
            found[name].update(one for one in asked if one in known and one != name)
    return found


def package_sizes() -> Counter[str]:
    """Count the modules of each package."""
    return Counter(name.rpartition(".")[0] for name in modules())


def part_of(module: str) -> str:
    """Return a room's package that a module is in, or the module where it stands in none."""
    depth = 2 if room_of(module) == "tierkv" else 3
    return ".".join(module.split(".")[:depth])


@cache
def parts() -> dict[str, set[str]]:
    """Return which packages of its own room each package imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, others in imports().items():
        for other in others:
            if room_of(other) == room_of(name) and part_of(other) != part_of(name):
                found[part_of(name)].add(part_of(other))
    return found


def circles() -> list[str]:
    """Return packages that import each other, directly or by others of their room."""
    reached = {part: _reached(part) for part in parts()}
    return sorted(part for part in reached if part in reached[part])


def _reached(start: str) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        new = parts().get(ahead.pop(), set()) - found
        found |= new
        ahead.extend(new)
    return found


def floors() -> dict[str, int]:
    """Return the longest chain of imports between the packages of each room."""
    most: Counter[str] = Counter()
    for name in modules():
        most[room_of(name)] = max(most[room_of(name)], _height(part_of(name), frozenset()))
    return dict(most)


def _height(part: str, above: frozenset[str]) -> int:
    below = parts().get(part, set()) - above - {part}
    return 1 + max((_height(other, above | {part}) for other in below), default=0)


def lone_fragments() -> list[str]:
    """Return modules that one other module of the same package imports, at its top.

    What is only imported inside a function stands apart because the import is heavy. The command
    line has a second importer outside of the code: the script that pip writes.
    """
    importers = defaultdict(set, {"tierkv.cli": {"scripts/tierkv"}})
    for name, others in imports().items():
        for other in others:
            importers[other].add(name)
    return [
        name
        for name in modules()
        if len(importers[name]) == 1
        and next(iter(importers[name])).rpartition(".")[0] == name.rpartition(".")[0]
        and name in _imported_at_top(next(iter(importers[name])))
    ]


def _imported_at_top(module: str) -> set[str]:
    return {
        node.module
        for node in modules()[module].body
        if isinstance(node, ast.ImportFrom) and node.module
    }


def lines_per_module() -> float:
    """Return how many lines a module has on average."""
    lines = sum(max(_last_line(tree), 1) for tree in modules().values())
    return lines / len(modules())


def _last_line(tree: ast.Module) -> int:
    return tree.body[-1].end_lineno or 0 if tree.body else 0


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield each class with the name of its module."""
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield name, node


def names_of_several_classes() -> list[str]:
    """Return public class names that more than one class has."""
    count = Counter(node.name for _, node in classes() if not node.name.startswith("_"))
    return sorted(name for name, times in count.items() if times > 1)


def public_methods(node: ast.ClassDef) -> list[FunctionNode]:
    """Return the methods of a class that others may call."""
    return [
        each
        for each in node.body
        if isinstance(each, FunctionNode) and not each.name.startswith("_")
    ]


def wide_classes(most: int = 20) -> list[str]:
    """Return classes with more public methods than that."""
    return sorted(f"{name}.{c.name}" for name, c in classes() if len(public_methods(c)) > most)


def forwarding_methods() -> list[str]:
    """Return methods whose only statement passes their own arguments on to an attribute."""
    return [
        f"{name}.{node.name}.{method.name}"
        for name, node in classes()
        for method in public_methods(node)
        if _forwards(method)
    ]


def _forwards(method: FunctionNode) -> bool:
    body = method.body[1:] if ast.get_docstring(method) is not None else method.body
    value = getattr(body[0], "value", None) if len(body) == 1 else None
    call = value.value if isinstance(value, ast.Await) else value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    owner = call.func.value
    if not isinstance(owner, ast.Attribute) or not isinstance(owner.value, ast.Name):
        return False
    own = [argument.arg for argument in method.args.args[1:]]
    return owner.value.id == "self" and [getattr(a, "id", None) for a in call.args] == own


def pronoun_share() -> float:
    """Return the share of pronouns in sentences of docstrings of nine words or more."""
    words = pronouns = 0
    for tree in modules().values():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | FunctionNode):
                continue
            for sentence in re.split(r"(?<=[.:;?!])\s+", ast.get_docstring(node) or ""):
                said = re.findall(r"[a-z']+", sentence.lower())
                if len(said) >= 9:
                    words += len(said)
                    pronouns += sum(word in PRONOUNS for word in said)
    return pronouns / words


if __name__ == "__main__":
    large = {name: size for name, size in package_sizes().items() if size > 15}
    print(f"modules {len(modules())}, classes {sum(1 for _ in classes())}")
    print(f"packages of more than 15 modules: {large}")
    print(f"floors of packages: {floors()}")
    print(f"packages in circles: {circles()}")
    print(f"modules with one importer, their neighbour: {len(lone_fragments())}")
    print(f"names of several classes: {len(names_of_several_classes())}")
    print(f"classes of more than 20 public methods: {wide_classes()}")
    print(f"forwarding methods: {len(forwarding_methods())}")
    print(f"pronouns: {pronoun_share():.1%}")
