"""When a statement with AI calls fails: limits, failed calls, and the place of an error in the SQL.

AiStatement (ai_statement.py) reports calls and answers here. ``Spending`` and ``Failures`` check
the session's ErrorPolicy. ``ReturningWatch`` refuses prompts that are never answered: a write is
run and undone until all answers are known, and column defaults such as a sequence, a random UUID or
the clock give different values in each run. ``blame`` adds the position of an AI call, or of its
argument, to an error about the argument. This module never sees rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.dbfront.accounts.ended_call import EndedCall
from tierkv.dbfront.contracts import PreparedCall
from tierkv.dbfront.statement_results import Notice
from tierkv.kvcore.errors import (
    FeatureNotSupportedError,
    SqlError,
    TierKVError,
    UdfArgumentError,
    UnknownModelError,
    UserError,
)
from tierkv.sql.plan.call_sites import CallSite
from tierkv.sql.plan.plan import StatementPlan

MAX_WARNED_MESSAGES = 5


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """How to treat failed calls and large statements; each limit of 0 means no limit.

    Attributes:
        on_error: ``null``, ``error``, or ``auto``: null in reads, error in writes.
        max_error_ratio: share of failed calls above which the statement fails in any case.
        max_calls: maximum number of distinct calls.
        notice_calls: above this number of calls the client gets a notice before the calls are sent.
        max_prompt_tokens: maximum number of prompt tokens sent.
        max_completion_tokens: maximum number of generated tokens.
        dry_run: calls are counted and give NULL; no request is sent.
    """

    on_error: str = "auto"
    max_error_ratio: float = 1.0
    max_calls: int = 1000
    notice_calls: int = 0
    max_prompt_tokens: int = 0
    max_completion_tokens: int = 0
    dry_run: bool = False


class Spending:
    """Cost of one statement so far, checked before requests are sent; a reducer of ended calls.

    Attributes:
        calls: distinct calls known so far that need a model.
        local_calls: distinct calls that need no model.
        vectors: vectors computed for a cascade, which count for ``tierkv.max_calls``.
        requests: requests to models, sent or (in a dry run) only counted.
        prompt_tokens: prompt tokens of these requests.
        partly: the next batch is of some of the statement's rows, and other rows will need more:
            an error does not tell the number needed.
    """

    def __init__(self, policy: ErrorPolicy) -> None:
        self.partly = False
        self.calls = 0
        self.local_calls = 0
        self.vectors = 0
        self.requests = 0
        self.prompt_tokens = 0
        self._policy = policy
        self._completion_tokens = 0

    def add_calls(self, count: int, *, local: int = 0) -> None:
        """Count the calls of another batch.

        Raises:
            SqlError: 53400, too many calls.
        """
        self.calls += count
        self.local_calls += local
        needed = self.calls + self.vectors
        self._check("AI calls", needed, "tierkv.max_calls", self._policy.max_calls)

    def refusal_of_vectors(self, count: int) -> str:
        """Return why further vectors may not be computed; empty if they may."""
        most = self._policy.max_calls
        if not most or self.calls + self.vectors + count <= most:
            return ""
        return f"{count} vectors would exceed tierkv.max_calls = {most}"

    @property
    def is_large(self) -> bool:
        """True if the client should be told the number of calls."""
        allowed = self._policy.notice_calls
        return bool(allowed) and self.calls > allowed and not self._policy.dry_run

    def add_wave(self, wave: Sequence[PreparedCall]) -> None:
        """Count requests to be sent together.

        Raises:
            SqlError: 53400, too many tokens.
        """
        self.requests += len(wave)
        self.prompt_tokens += sum(len(prepared.request.token_ids) for prepared in wave)
        self._check(
            "prompt tokens",
            self.prompt_tokens,
            "tierkv.max_prompt_tokens",
            self._policy.max_prompt_tokens,
        )
        may_come = sum(_most_generated(prepared) for prepared in wave)
        self._check(
            "tokens to generate, if all answers reach max_tokens",
            self._completion_tokens + may_come,
            "tierkv.max_completion_tokens",
            self._policy.max_completion_tokens,
        )

    def take(self, call: EndedCall) -> None:
        """Count the tokens generated for a call."""
        self._completion_tokens += call.cost.usage.completion_tokens

    def rehearsed(self) -> Notice:
        """Return the notice with the result of a dry run."""
        return Notice(
            "NOTICE",
            f"dry run: {self.calls} AI calls with {self.prompt_tokens} prompt tokens in "
            f"{self.requests} requests were not sent and gave NULL",
            detail="Calls that depend on their answers are not counted.",
            hint="RESET tierkv.dry_run sends them.",
        )

    def _check(self, what: str, needed: int, setting: str, allowed: int) -> None:
        if not allowed or needed <= allowed or self._policy.dry_run:
            return
        number, hint = f"at least {needed}", f"SET {setting} = {needed} (0 is no limit)"
        if self.partly:
            number, hint = "more", f"SET {setting} = 0 for no limit"
        raise SqlError(
            f"this statement needs {number} {what}; {setting} allows {allowed}",
            sqlstate="53400",
            hint=f"{hint}, or ask for fewer rows. EXPLAIN (AI_ESTIMATE) shows how much it needs.",
        )


class Failures:
    """The failed calls of one statement that continues; a reducer of ended calls."""

    def __init__(self, policy: ErrorPolicy, *, writes: bool) -> None:
        self._messages: list[str] = []
        self._policy = policy
        auto = "error" if writes else "null"
        self._on_error = auto if policy.on_error == "auto" else policy.on_error

    def take(self, call: EndedCall) -> None:
        """Keep the message of a failed call that gives NULL."""
        if call.error is not None and call.is_null:
            self._messages.append(call.error.message)

    def check(self, error: TierKVError, calls: int) -> None:
        """Decide whether the statement continues after a failure among ``calls`` calls.

        Raises:
            TierKVError: the statement fails.
        """
        if self._on_error == "error":
            raise error
        if len(self._messages) > self._policy.max_error_ratio * calls:
            raise SqlError(
                f"{len(self._messages)} of {calls} AI calls failed, more than "
                f"tierkv.max_error_ratio allows",
                sqlstate="22000",
                detail="\n".join(self._distinct()),
            )

    def notices(self, calls: int) -> list[Notice]:
        """Return the warning about failed calls, if there are any."""
        if not self._messages:
            return []
        return [
            Notice(
                "WARNING",
                f"{len(self._messages)} of {calls} AI calls failed and gave NULL: "
                f"{'; '.join(self._distinct())}",
                sqlstate="01000",
                hint="To make the statement fail instead, SET tierkv.on_error = 'error'.",
            )
        ]

    def _distinct(self) -> list[str]:
        return list(dict.fromkeys(self._messages))[:MAX_WARNED_MESSAGES]


def _most_generated(prepared: PreparedCall) -> int:
    """Return the maximum number of tokens a request may generate; 0 for readouts."""
    if prepared.call.labels or prepared.call.embed:
        return 0
    return prepared.request.sampling.max_tokens


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
                "the prompts of this AI call in RETURNING differ each time the statement runs",
                position=self._position[keys[0]],
                hint="They depend on a default such as a sequence, a random value or the clock. "
                "Write the rows first, then make the AI calls in a SELECT or UPDATE over them.",
            )


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
