"""Detects early that the prompts of a RETURNING clause change in every round.

A write is run and undone until all answers are known. Column defaults such as a sequence, a random
UUID or the clock give different values in each run, so prompts with these values are never
answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tierkv.kvcore.errors import FeatureNotSupportedError
from tierkv.sql.plan.plan import StatementPlan

_ROUNDS: Final = 3
"""Consecutive rounds with new questions from the same calls. Nested calls need one more round each.
"""


class ReturningWatch:
    """Checks the missed calls of each round before the calls are sent."""

    def __init__(self, plan: StatementPlan) -> None:
        elsewhere = {site.form.key for site in plan.sites if site.clause != "RETURNING"}
        self._position = {
            site.form.key: site.position
            for site in reversed(plan.sites)
            if site.form.key not in elsewhere
        }
        self._last: list[int] = []
        self._rounds = 0

    def check(self, missed: Iterable[int]) -> None:
        """Record the form of each missed question of a round.

        Raises:
            FeatureNotSupportedError: RETURNING asks new questions in every round.
        """
        keys = sorted(missed)
        same = keys == self._last and all(key in self._position for key in keys)
        self._last, self._rounds = keys, self._rounds + 1 if same else 1
        if self._rounds == _ROUNDS:
            raise FeatureNotSupportedError(
                "the prompts of this AI call in RETURNING are others each time the statement runs",
                position=self._position[keys[0]],
                hint="They read a default such as a sequence, a random value or the clock. Write "
                "the rows first, then call the AI in a SELECT or UPDATE over them.",
            )
