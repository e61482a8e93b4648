"""Finds chat templates that only copy messages: one rendering serves all texts of a statement.

Called by dbfront/tokens/chat_template.py. A statement renders thousands of conversations with
different texts only, and Jinja takes longer than all other preparation of a call. If no condition,
filter or call of a template depends on a text, the rendered prompt is always the same text with the
messages in the same places. ``copies_contents`` proves this from the syntax tree; whatever it
doesn't know counts as a dependence. ``Skeleton`` is a rendering with gaps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from jinja2 import nodes

_PAD: Final = "\u2003"  # Whitespace that no template writes: shows whether a text is stripped.
_OPEN, _CLOSE = "\ue000", "\ue001"
_GAP: Final = re.compile(f"({_PAD}?){_OPEN}(\\d+){_CLOSE}({_PAD}?)")

_TYPE_TESTS: Final = frozenset(
    {"string", "defined", "undefined", "none", "mapping", "iterable", "sequence"}
)
"""Tests of the type: a message is always a mapping, its text a string."""
_OF_LISTS: Final = frozenset({"length", "count"})
_CHANGING: Final = frozenset({"strftime_now", "random", "lipsum"})
_NEIGHBOURS: Final = frozenset({"previtem", "nextitem"})


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A rendered conversation with gaps for the messages' texts.

    Attributes:
        literals: the text around the gaps; one more than there are gaps.
        gaps: for each gap the index of the message, and whether its text is stripped.
    """

    literals: tuple[str, ...]
    gaps: tuple[tuple[int, bool], ...]

    def filled(self, contents: Sequence[str]) -> str:
        """Return the rendered conversation with these texts."""
        parts = [self.literals[0]]
        for (index, strips), literal in zip(self.gaps, self.literals[1:], strict=True):
            parts.append(contents[index].strip() if strips else contents[index])
            parts.append(literal)
        return "".join(parts)


def skeleton(render: Callable[[Sequence[str]], str], count: int) -> Skeleton | None:
    """Make the skeleton of conversations of ``count`` messages, for a template that copies them.

    Args:
        render: renders these messages with other texts.
        count: number of messages.

    Returns:
        None if the gaps are not as expected.
    """
    text = render([f"{_PAD}{_OPEN}{index}{_CLOSE}{_PAD}" for index in range(count)])
    literals, gaps, end = [], [], 0
    for found in _GAP.finditer(text):
        before, index, after = found.groups()
        if before != after:
            return None
        literals.append(text[end : found.start()])
        gaps.append((int(index), not before))
        end = found.end()
    literals.append(text[end:])
    if any(mark in literal for literal in literals for mark in (_PAD, _OPEN, _CLOSE)):
        return None
    return Skeleton(tuple(literals), tuple(gaps))


class TextCopies(Enum):
    """Whether a template does nothing with the texts of messages but copy or strip them."""

    NEVER = auto()
    NOT_EMPTY = auto()
    """If no text is empty: it asks for nothing else."""
    ALWAYS = auto()


def copies_contents(template: nodes.Template) -> TextCopies:
    """Return whether a template only copies or strips the texts of messages."""
    names = _Names()
    while True:
        before = (len(names.lists), len(names.texts))
        try:
            names.follow(template.body)
        except _Depends:
            return TextCopies.NEVER
        if before == (len(names.lists), len(names.texts)):
            return TextCopies.NOT_EMPTY if names.asks_for_text else TextCopies.ALWAYS


class _Depends(Exception):
    """The template depends on a text, or nobody knows."""


class _Kind(Enum):
    """What an expression holds: a text, messages, or nothing of a text."""

    TEXT = auto()
    MESSAGES = auto()
    OTHER = auto()


class _Names:
    """What the names of a template hold; grows until a pass finds nothing new.

    Attributes:
        lists: names of a message or of messages.
        texts: names of a text, or of a text with others around.
        asks_for_text: a condition is true for any text that is not empty.
    """

    def __init__(self) -> None:
        self.lists = {"messages"}
        self.texts: set[str] = set()
        self.asks_for_text = False

    def follow(self, statements: Sequence[nodes.Node]) -> None:
        """Read statements; raise _Depends if one depends on a text."""
        for statement in statements:
            self._follow_one(statement)

    def _follow_one(self, statement: nodes.Node) -> None:
        match statement:
            case nodes.Output():
                for part in statement.nodes:
                    _require(self._kind(part) is not _Kind.MESSAGES)
            case nodes.If():
                self._check_condition(statement.test)
                self.follow([*statement.body, *statement.elif_, *statement.else_])
            case nodes.For():
                self._bind(statement.target, self._kind(statement.iter), no_text=True)
                if statement.test is not None:
                    self._check_condition(statement.test)
                self.follow([*statement.body, *statement.else_])
            case nodes.Assign():
                self._bind(statement.target, self._kind(statement.node))
            case nodes.Scope():
                self.follow(statement.body)
            case nodes.Macro():
                self._require_apart(statement)
            case nodes.Continue() | nodes.Break():
                pass
            case _:
                raise _Depends

    def _check_condition(self, test: nodes.Node) -> None:
        match test:
            case nodes.And() | nodes.Or() | nodes.Not():
                for part in test.iter_child_nodes():
                    self._check_condition(part)
            case _ if self._is_text_itself(test):
                self.asks_for_text = True
            case _:
                _require(self._kind(test) is not _Kind.TEXT)

    def _bind(self, target: nodes.Node, kind: _Kind, *, no_text: bool = False) -> None:
        _require(not (no_text and kind is _Kind.TEXT))
        if kind is _Kind.OTHER:
            return
        _require(isinstance(target, nodes.Name))
        assert isinstance(target, nodes.Name)
        (self.texts if kind is _Kind.TEXT else self.lists).add(target.name)
        _require(not self.texts & self.lists)

    def _require_apart(self, macro: nodes.Node) -> None:
        """A macro is called by name, so what it knows of messages would not be seen at the call."""
        for name in macro.find_all(nodes.Name):
            _require(name.name not in self.texts and name.name not in self.lists)
            _require(name.name not in _CHANGING)

    def _kind(self, node: nodes.Node) -> _Kind:
        match node:
            case nodes.Name():
                return self._kind_of_name(node.name)
            case nodes.Getattr():
                return self._kind_of_part(node.node, node.attr)
            case nodes.Getitem(arg=nodes.Const() as key):
                return self._kind_of_part(node.node, key.value)
            case nodes.Getitem():
                holds = self._kind(node.node)
                _require(self._is_other(node.arg) and holds is not _Kind.TEXT)
                fixed = isinstance(node.arg, nodes.Slice | nodes.Neg)
                _require(holds is _Kind.OTHER or fixed)
                return holds
            case nodes.Add() | nodes.Concat() | nodes.CondExpr():
                return self._kind_of_any(node)
            case nodes.Filter(name="trim", args=[], kwargs=[]) if self._is_text_itself(node.node):
                return _Kind.TEXT
            case nodes.Call(node=nodes.Getattr(attr="strip") as method, args=[]) if (
                self._is_text_itself(method.node)
            ):
                return _Kind.TEXT
            case nodes.Filter() if node.name in _OF_LISTS and node.node is not None:
                _require(self._kind(node.node) is not _Kind.TEXT)
                return _Kind.OTHER
            case nodes.Test() if node.name in _TYPE_TESTS and not node.args:
                self._kind(node.node)
                return _Kind.OTHER
            case nodes.Not():
                self._check_condition(node.node)
                return _Kind.OTHER
            case nodes.And() | nodes.Or():
                kinds = [self._kind(part) for part in (node.left, node.right)]
                _require(_Kind.TEXT not in kinds)
                return _Kind.MESSAGES if _Kind.MESSAGES in kinds else _Kind.OTHER
            case _:
                _require(not (isinstance(node, nodes.Filter) and node.name in _CHANGING))
                _require(all(map(self._is_other, node.iter_child_nodes())))
                return _Kind.OTHER

    def _kind_of_name(self, name: str) -> _Kind:
        _require(name not in _CHANGING)
        if name in self.texts:
            return _Kind.TEXT
        return _Kind.MESSAGES if name in self.lists else _Kind.OTHER

    def _kind_of_part(self, node: nodes.Node, key: object) -> _Kind:
        """Return what an item or attribute holds."""
        holds = self._kind(node)
        _require(holds is not _Kind.TEXT and key not in _NEIGHBOURS)
        if holds is _Kind.OTHER:
            return _Kind.OTHER
        if isinstance(key, int):
            return _Kind.MESSAGES
        _require(isinstance(key, str) and not hasattr(dict, key) and not hasattr(list, key))
        return _Kind.TEXT if key == "content" else _Kind.OTHER

    def _kind_of_any(self, node: nodes.Node) -> _Kind:
        """Return TEXT if any operand is one; a condition must not be one."""
        if isinstance(node, nodes.CondExpr):
            self._check_condition(node.test)
            parts: list[nodes.Node] = [node.expr1]
            if node.expr2 is not None:
                parts.append(node.expr2)
        else:
            parts = list(node.iter_child_nodes())
        kinds = [self._kind(part) for part in parts]
        _require(_Kind.MESSAGES not in kinds)
        return _Kind.TEXT if _Kind.TEXT in kinds else _Kind.OTHER

    def _is_other(self, node: nodes.Node) -> bool:
        return self._kind(node) is _Kind.OTHER

    def _is_text_itself(self, node: nodes.Node | None) -> bool:
        """Return whether an expression is ``message.content``, with nothing around."""
        if not isinstance(node, nodes.Getattr | nodes.Getitem):
            return False
        return self._kind(node) is _Kind.TEXT


def _require(holds: bool) -> None:
    if not holds:
        raise _Depends
