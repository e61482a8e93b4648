"""PostgreSQL's operators, functions and casts, and PostgreSQL's rules for overload resolution.

deploy/make-pg-signatures.py makes ``signatures.txt`` from a real PostgreSQL. ``operator`` and
``function`` follow the chapter "Type Conversion" of PostgreSQL's manual: exact matches first, then
preferred types, then the possible types of the unknown arguments. Types are PostgreSQL's names,
``_int4`` is an array, ``unknown`` a parameter or string literal without a type, None a type that
cannot be inferred.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Final

UNKNOWN: Final = "unknown"
_STRING: Final = "S"
_ARRAYS: Final = frozenset({"anyarray", "anycompatiblearray"})
_POLYMORPHIC: Final = _ARRAYS | {"anyelement", "anynonarray", "anycompatible"}

TypeName = str | None


@dataclass(frozen=True, slots=True)
class Signature:
    """Argument types and result type of an operator or function."""

    arguments: tuple[str, ...]
    result: str
    defaults: int = 0
    variadic: bool = False

    def of_length(self, count: int) -> Signature | None:
        """Return this signature for a call with ``count`` arguments; None for a wrong count."""
        most = len(self.arguments)
        if self.variadic and count >= most:
            last = self.arguments[-1].removeprefix("_")
            return Signature((*self.arguments[:-1], *[last] * (count - most + 1)), self.result)
        if not most - self.defaults <= count <= most:
            return None
        return Signature(self.arguments[:count], self.result)


@dataclass(slots=True)
class Signatures:
    """The contents of signatures.txt.

    Attributes:
        categories: categories of types, by one letter.
        preferred: the preferred types of the categories.
        casts: implicit casts, from and to.
    """

    categories: dict[str, str] = field(default_factory=dict)
    preferred: set[str] = field(default_factory=set)
    casts: set[tuple[str, str]] = field(default_factory=set)
    operators: dict[str, list[Signature]] = field(default_factory=dict)
    functions: dict[str, list[Signature]] = field(default_factory=dict)

    def category(self, kind: str) -> str:
        """Return the category of a type: one letter."""
        return "A" if kind.startswith("_") else self.categories.get(kind, "P")

    def coercible(self, kind: TypeName, target: str) -> bool:
        """Return True if a value of a type may stand in a place that expects the target type."""
        if kind in (UNKNOWN, None, target) or target == "any":
            return True
        assert kind is not None, "tested above"
        if target in _POLYMORPHIC:
            return kind.startswith("_") == (target in _ARRAYS) or target in (
                *("anyelement", "anycompatible"),
            )
        if kind.startswith("_") and target.startswith("_"):
            return self.coercible(kind[1:], target[1:])
        return (kind, target) in self.casts

    def common(self, kinds: Iterable[TypeName]) -> TypeName:
        """Find the type of CASE, COALESCE, VALUES, UNION and lists; None without a common type."""
        found: TypeName = UNKNOWN
        for kind in kinds:
            if kind in (UNKNOWN, found):
                continue
            if kind is None or found is None:
                return None
            if found == UNKNOWN:
                found = kind
            elif self.category(found) != self.category(kind):
                return None
            elif found not in self.preferred and self._only_widens(found, kind):
                found = kind
        return "text" if found == UNKNOWN else found

    def _only_widens(self, kind: str, target: str) -> bool:
        return self.coercible(kind, target) and not self.coercible(target, kind)

    def operator(self, name: str, left: TypeName, right: TypeName) -> Signature | None:
        """Choose the operator for two operands; ``-`` as ``left`` means a prefix operator."""
        signatures = self.operators.get(name, [])
        if left == "-":
            prefix = [Signature(s.arguments[1:], s.result) for s in signatures if _prefix(s)]
            return self._choose(prefix, (right,))
        signatures = [signature for signature in signatures if not _prefix(signature)]
        same = (right if left == UNKNOWN else left, left if right == UNKNOWN else right)
        exact = next((s for s in signatures if s.arguments == same), None)
        return exact or self._choose(signatures, (left, right))

    def function(self, name: str, kinds: Sequence[TypeName]) -> Signature | None:
        """Choose a call's function; if PostgreSQL refuses, keep types common to all overloads."""
        sized = [s.of_length(len(kinds)) for s in self.functions.get(name, ())]
        signatures = [signature for signature in sized if signature is not None]
        exact = next((s for s in signatures if s.arguments == tuple(kinds)), None)
        return exact or self._choose(signatures, kinds) or _agreed(signatures)

    def _choose(
        self, signatures: Sequence[Signature], kinds: Sequence[TypeName]
    ) -> Signature | None:
        fit = [s for s in signatures if all(map(self.coercible, kinds, s.arguments))]
        if None in kinds and len(fit) > 1:
            return _agreed(fit)
        if len(fit) > 1:
            fit = _best(fit, lambda s: sum(map(str.__eq__, s.arguments, map(str, kinds))))
        if len(fit) > 1:
            fit = _best(fit, lambda s: self._matches(s, kinds))
        if len(fit) > 1:
            fit = self._by_unknowns(fit, kinds)
        if len(fit) > 1:
            fit = self._by_the_known(fit, kinds)
        return self._filled(fit[0], kinds) if len(fit) == 1 else None

    def _matches(self, signature: Signature, kinds: Sequence[TypeName]) -> int:
        """Count arguments with an exact match or the preferred type of their category."""
        return sum(
            kind == wanted or (wanted in self.preferred and self._alike(kind, wanted))
            for kind, wanted in zip(kinds, signature.arguments, strict=True)
            if kind not in (UNKNOWN, None)
        )

    def _alike(self, kind: TypeName, wanted: str) -> bool:
        return self.category(str(kind)) == self.category(wanted)

    def _by_unknowns(self, fit: list[Signature], kinds: Sequence[TypeName]) -> list[Signature]:
        """Keep candidates with the likeliest category at each argument without a type."""
        for at, kind in enumerate(kinds):
            if kind != UNKNOWN:
                continue
            categories = {self.category(signature.arguments[at]) for signature in fit}
            category = _STRING if _STRING in categories else min(categories)
            if category != _STRING and len(categories) > 1:
                continue
            fit = [s for s in fit if self.category(s.arguments[at]) == category]
            liked = [s for s in fit if s.arguments[at] in self.preferred]
            fit = liked or fit
        return fit

    def _by_the_known(self, fit: list[Signature], kinds: Sequence[TypeName]) -> list[Signature]:
        """If all known arguments have one type, suppose the same type for the unknown arguments."""
        known = {kind for kind in kinds if kind not in (UNKNOWN, None)}
        if len(known) != 1:
            return fit
        return [s for s in fit if all(self.coercible(next(iter(known)), a) for a in s.arguments)]

    def _filled(self, signature: Signature, kinds: Sequence[TypeName]) -> Signature:
        """Replace anyelement and its family by actual types."""
        if not _POLYMORPHIC.intersection((*signature.arguments, signature.result)):
            return signature
        elements: list[TypeName] = [
            kind.removeprefix("_") if kind is not None and wanted in _ARRAYS else kind
            for kind, wanted in zip(kinds, signature.arguments, strict=True)
            if wanted in _POLYMORPHIC
        ]
        element = self.common(elements)
        if element is None:
            return Signature(tuple(_any(a) for a in signature.arguments), _any(signature.result))
        return Signature(
            tuple(_actual(argument, element) for argument in signature.arguments),
            _actual(signature.result, element),
        )


def _agreed(fit: Sequence[Signature]) -> Signature | None:
    """Return the argument and result types that all candidates have in common."""
    if not fit:
        return None
    columns = zip(*(signature.arguments for signature in fit), strict=True)
    results = {signature.result for signature in fit}
    return Signature(
        tuple(_any(kinds[0]) if len(set(kinds)) == 1 else "any" for kinds in columns),
        _any(results.pop()) if len(results) == 1 else "any",
    )


def _prefix(signature: Signature) -> bool:
    return signature.arguments[0] == "-"


def _any(kind: str) -> str:
    return "any" if kind in _POLYMORPHIC else kind


def _actual(kind: str, element: str) -> str:
    if kind not in _POLYMORPHIC:
        return kind
    return f"_{element}" if kind in _ARRAYS else element


def _best(fit: list[Signature], score: Callable[[Signature], int]) -> list[Signature]:
    most = max(map(score, fit))
    return [signature for signature in fit if score(signature) == most]


@lru_cache(maxsize=1)
def signatures() -> Signatures:
    """Read signatures.txt, once."""
    found = Signatures()
    text = files("tierkv.dbfront.postgres_dialect.inference").joinpath("signatures.txt").read_text()
    for line in text.splitlines():
        _read(found, line.split())
    return found


def _read(found: Signatures, words: Sequence[str]) -> None:
    match words:
        case ["type", name, category]:
            found.categories[name] = category[0]
            if category.endswith("!"):
                found.preferred.add(name)
        case ["cast", source, target]:
            found.casts.add((source, target))
        case ["operator", name, left, right, result]:
            found.operators.setdefault(name, []).append(Signature((left, right), result))
        case ["function", name, defaults, variadic, result, *arguments]:
            signature = Signature(tuple(arguments), result, int(defaults), variadic == "1")
            found.functions.setdefault(name, []).append(signature)
