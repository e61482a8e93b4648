"""Telling an error of an AI call's argument where in the statement the call stands."""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.errors import UnknownModelError, UserError
from sql.plan import CallSite, StatementPlan

_CHECKED_LATE = ("schema", "categories", "options")
"""Arguments that a model's own check may refuse."""


def blame(error: UserError, plan: StatementPlan, form_keys: Iterable[int]) -> None:
    """Give an error without position the one of the argument, or of the call, that it is about.

    Args:
        error: changed.
        plan: whose calls they are.
        form_keys: of the calls that failed; the first as written is blamed.
    """
    keys = set(form_keys)
    site = next((site for site in plan.sites if site.form.key in keys), None)
    if site is not None and not error.position:
        error.position = _position(error, site)


def _position(error: UserError, site: CallSite) -> int:
    positions = dict(site.arguments)
    late = ("model",) if isinstance(error, UnknownModelError) else _CHECKED_LATE
    constant = [name for name in late if site.form.constant(name) is not None]
    return next((positions[name] for name in constant if name in positions), site.position)
