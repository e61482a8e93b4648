"""The policy for failed calls and large statements, with the counters for checking the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.dbfront.accounts.ended_call import EndedCall
from tierkv.dbfront.contracts import Notice, PreparedCall
from tierkv.kvcore.errors import SqlError, TierKVError

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
        requests: requests to models, sent or (in a dry run) only counted.
        prompt_tokens: prompt tokens of these requests.
    """

    def __init__(self, policy: ErrorPolicy) -> None:
        self.calls = 0
        self.local_calls = 0
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
        self._check("AI calls", self.calls, "tierkv.max_calls", self._policy.max_calls)

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
            "tokens to generate, if all answers are as long as max_tokens lets them",
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
        if allowed and needed > allowed and not self._policy.dry_run:
            raise SqlError(
                f"this statement needs at least {needed} {what}; {setting} allows {allowed}",
                sqlstate="53400",
                hint=f"SET {setting} = {needed} (0 is no limit), or ask for fewer rows.",
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
                hint="SET tierkv.on_error = 'error' makes the statement fail instead.",
            )
        ]

    def _distinct(self) -> list[str]:
        return list(dict.fromkeys(self._messages))[:MAX_WARNED_MESSAGES]


def _most_generated(prepared: PreparedCall) -> int:
    """Return the maximum number of tokens a request may generate; 0 for readouts."""
    if prepared.call.labels or prepared.call.embed:
        return 0
    return prepared.request.sampling.max_tokens
