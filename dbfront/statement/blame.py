"""Telling an error of an AI call's argument where in the statement the call stands."""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.kvcore.errors import UdfArgumentError, UnknownModelError, UserError
from tierkv.sql.plan.plan import CallSite, StatementPlan

_CHECKED_LATE = ("schema", "categories", "options")
"""Arguments that are checked per row, or by a model; the likeliest first."""


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
    suspects: tuple[str, ...] = ()
    if isinstance(error, UnknownModelError):
        suspects = ("model",)
    elif isinstance(error, UdfArgumentError):
        suspects = _CHECKED_LATE
    given = dict(site.arguments)
    return next((given[name] for name in suspects if name in given), site.position)
