"""Adds the position of an AI call, or of its argument, to an error about the argument."""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.kvcore.errors import UdfArgumentError, UnknownModelError, UserError
from tierkv.sql.plan.plan import CallSite, StatementPlan

_CHECKED_LATE = ("schema", "categories", "options")
"""Arguments checked per row or by a model, most likely cause first."""


def blame(error: UserError, plan: StatementPlan, form_keys: Iterable[int]) -> None:
    """Set the position of an error without a position: the faulty argument's, or else the call's.

    Args:
        error: changed in place.
        plan: plan of the statement.
        form_keys: forms of the failed calls; the first call in the SQL text is blamed.
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
