"""A hint is a sentence, as in PostgreSQL: a capital letter, and a full stop at the end.

Checked where the code gives a hint as text: ``hint=...``, assignments to a name or attribute
``hint``, results of functions whose name ends in ``hint``, and constants that are given as hints.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.house.test_budgets import CODE as ALL_CODE
from tests.house.test_budgets import ROOT

CODE = [path for path in ALL_CODE if "demo_model" not in path.parts]
"""The demo model's data has hints of another kind."""

_UNKNOWN = "\0"
"""Stands for a part of a text that is computed."""


def texts(node: ast.expr | None, constants: dict[str, ast.expr]) -> Iterator[str]:
    """Yield every text that an expression may be."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr():
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else _UNKNOWN
                for part in node.values
            )
        case ast.IfExp():
            yield from texts(node.body, constants)
            yield from texts(node.orelse, constants)
        case ast.BoolOp():
            for part in node.values:
                yield from texts(part, constants)
        case ast.BinOp(op=ast.Add()):
            for first in list(texts(node.left, constants)) or [_UNKNOWN]:
                for last in list(texts(node.right, constants)) or [_UNKNOWN]:
                    yield first + last
        case ast.Dict():
            for value in node.values:
                yield from texts(value, constants)
        case ast.Subscript():
            yield from texts(node.value, constants)
        case ast.Name() if node.id in constants:
            yield from texts(constants[node.id], constants)


def hints_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the hints of a module, with their lines."""
    constants: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            constants[ast.unparse(node.target)] = node.value
    for node in ast.walk(tree):
        given: list[ast.expr | None] = []
        if isinstance(node, ast.keyword) and node.arg == "hint":
            given = [node.value]
        elif isinstance(node, ast.Assign):
            named = {ast.unparse(target).rpartition(".")[2] for target in node.targets}
            given = [node.value] if "hint" in named else []
        elif isinstance(node, ast.FunctionDef) and node.name.endswith(("hint", "did_you_mean")):
            given = [part.value for part in ast.walk(node) if isinstance(part, ast.Return)]
        for value in given:
            for text in texts(value, constants):
                yield getattr(value, "lineno", 0), text


def is_sentence(text: str) -> bool:
    """True for a capital letter and a full stop; a part that is computed is trusted."""
    begins = text[0].isupper() or text[0] == _UNKNOWN
    return not text or (begins and (text[-1] in ".?" or text == _UNKNOWN))


def test_hints_are_sentences() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in CODE
        for line, text in hints_of(ast.parse(path.read_text()))
        if text and not is_sentence(text)
    ]
    assert wrong == [], "\n".join(wrong)


def test_hints_are_found() -> None:
    found = [text for path in CODE for _, text in hints_of(ast.parse(path.read_text()))]
    assert len(found) > 200


@pytest.mark.parametrize(
    ("code", "hints"),
    [
        ("raise E('a', hint='Do it.' if b else 'or not')", ["Do it.", "or not"]),
        ("H = 'x'\nraise E('a', hint=H)", ["x"]),
        ("H: Final = {1: 'x'}\ne.hint = H[1] or f'{a} b' + 'c'", ["x", "\0 bc"]),
        ("def some_hint():\n    return f'Did you mean {a}?'", ["Did you mean \0?"]),
    ],
)
def test_the_search_follows_expressions(code: str, hints: list[str]) -> None:
    assert [text for _, text in hints_of(ast.parse(code))] == hints


def test_a_sentence_has_a_capital_letter_and_a_full_stop() -> None:
    assert is_sentence("Do it.") and is_sentence("\0?") and is_sentence("\0")
    assert not any(map(is_sentence, ("do it.", "Do it", "Do \0")))
