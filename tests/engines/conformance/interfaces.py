"""Compares a class of ours with the abstract class of an engine that it stands in for.

An engine calls by name, by position or by keyword, as its own base class is declared: what that
declaration allows ours must take, for each method we override.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def load(path: str) -> Any:
    """Return ``module:name``; what engines warn of when they are imported is their business."""
    module, _, name = path.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(module), name)


def hooks_of(*bases: type) -> dict[str, Any]:
    """Return everything public that bases define, as it stands in their classes."""
    return {
        name: value
        for base in bases
        for each in reversed(base.__mro__)
        if each is not object
        for name, value in vars(each).items()
        if not name.startswith("_") and (callable(value) or _is_wrapped(value))
    }


def overridden(ours: type, *bases: type) -> set[str]:
    """Return the hooks of bases that ours has its own code for."""
    above = {each for base in bases for each in base.__mro__}
    mine = {name for each in ours.__mro__ if each not in above for name in vars(each)}
    return mine & hooks_of(*bases).keys()


def misfits(ours: type, *bases: type) -> list[str]:
    """Say what of ours an engine can't use as it uses the bases; nothing if all is well."""
    found = [
        f"{name} is abstract still" for name in sorted(getattr(ours, "__abstractmethods__", ()))
    ]
    theirs = hooks_of(*bases)
    for name in sorted(overridden(ours, *bases)):
        mine = inspect.getattr_static(ours, name)
        if _kind(mine) != _kind(theirs[name]):
            found.append(f"{name} is a {_kind(mine)}, not a {_kind(theirs[name])}")
        elif _kind(mine) != "property":
            found += [f"{name}: {why}" for why in refusals(_plain(mine), _plain(theirs[name]))]
    return found


def refusals(mine: Callable[..., Any], theirs: Callable[..., Any]) -> list[str]:
    """Say which calls that ``theirs`` is declared for ``mine`` would refuse."""
    signature = inspect.signature(mine)
    parameters = list(inspect.signature(theirs).parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind in POSITIONAL + NAMED]
    found = [_refusal(signature, every, how) for every in (needed, parameters) for how in (0, 1)]
    found.append(_disorder(list(signature.parameters), parameters))
    kinds = {p.kind for p in signature.parameters.values()}
    for kind, what in (
        (inspect.Parameter.VAR_POSITIONAL, "*args"),
        (inspect.Parameter.VAR_KEYWORD, "**kwargs"),
    ):
        if any(p.kind is kind for p in parameters) and kind not in kinds:
            found.append(f"{what} are not taken")
    return [why for why in dict.fromkeys(found) if why]


def _refusal(signature: inspect.Signature, given: list[inspect.Parameter], by_name: int) -> str:
    """Try one call: by position what can be, or by name what can be."""
    first, second = (NAMED, POSITIONAL) if by_name else (POSITIONAL, NAMED)
    # The receiver always comes by position.
    receiver, rest = given[:1], given[1:]
    names = [p.name for p in rest if p.kind in first]
    others = [p.name for p in rest if p.kind in second and p.kind not in first]
    args, named = (others, names) if by_name else (names, others)
    try:
        signature.bind(*[0 for _ in receiver], *[0 for _ in args], **dict.fromkeys(named, 0))
    except TypeError as error:
        return f"{error}, called with {', '.join(p.name for p in rest) or 'nothing'}"
    return ""


def _disorder(mine: list[str], theirs: list[inspect.Parameter]) -> str:
    """Arguments that come by position must mean the same; the receiver may have any name."""
    order = [p.name for p in theirs if p.kind in POSITIONAL][1:]
    places = [mine.index(name) for name in order if name in mine]
    return "" if places == sorted(places) else f"another order than {', '.join(order)}"


def _is_wrapped(value: Any) -> bool:
    return isinstance(value, (property, classmethod, staticmethod))


def _kind(value: Any) -> str:
    return type(value).__name__ if _is_wrapped(value) else "method"


def _plain(value: Any) -> Callable[..., Any]:
    return value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
