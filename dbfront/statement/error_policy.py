"""What failed calls and big statements lead to, and the books kept about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierkv.dbfront.accounts.ended_call import EndedCall
from tierkv.dbfront.contracts import Notice, PreparedCall
from tierkv.kvcore.errors import SqlError, TierKVError

MAX_WARNED_MESSAGES = 5


@dataclass(frozen=True, slots=True)
class ErrorPolicy:
    """What failed calls and big statements lead to; 0 is no limit everywhere.

    Attributes:
        on_error: ``null``, ``error``, or ``auto``: null in reads, error in writes.
        max_error_ratio: share of failures above which the statement fails anyway.
        max_calls: most distinct calls.
        notice_calls: of more, the client is told before they are made.
        max_prompt_tokens: most tokens it may send.
        max_completion_tokens: most tokens it may have generated.
        dry_run: nothing is sent; calls are counted and give NULL.
    """

    on_error: str = "auto"
    max_error_ratio: float = 1.0
    max_calls: int = 1000
    notice_calls: int = 0
    max_prompt_tokens: int = 0
    max_completion_tokens: int = 0
    dry_run: bool = False


class Spending:
    """What one statement needs so far, checked before anything of it is sent; a reducer.

    Attributes:
        calls: distinct calls known so far that ask models.
        local_calls: those that ask nobody.
        requests: what the models were or would be asked for them.
        prompt_tokens: of these.
    """

    def __init__(self, policy: ErrorPolicy) -> None:
        self.calls = 0
        self.local_calls = 0
        self.requests = 0
        self.prompt_tokens = 0
        self._policy = policy
        self._completion_tokens = 0

    def add_calls(self, count: int, *, local: int = 0) -> None:
        """Count calls of another batch.

        Raises:
            SqlError: 53400, too many.
        """
        self.calls += count
        self.local_calls += local
        self._check("AI calls", self.calls, "tierkv.max_calls", self._policy.max_calls)

    @property
    def is_large(self) -> bool:
        """True when the client is to be told how many calls there are."""
        allowed = self._policy.notice_calls
        return bool(allowed) and self.calls > allowed and not self._policy.dry_run

    def add_wave(self, wave: Sequence[PreparedCall]) -> None:
        """Count requests that are about to be sent at the same time.

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
        """Count what was generated for a call."""
        self._completion_tokens += call.cost.usage.completion_tokens

    def rehearsed(self) -> Notice:
        """Say what a dry run found."""
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
    """The failed calls of one statement that reads on; a reducer of its calls."""

    def __init__(self, policy: ErrorPolicy, *, writes: bool) -> None:
        self._messages: list[str] = []
        self._policy = policy
        auto = "error" if writes else "null"
        self._on_error = auto if policy.on_error == "auto" else policy.on_error

    def take(self, call: EndedCall) -> None:
        """Keep the message of a call that failed and gives NULL."""
        if call.error is not None and call.is_null:
            self._messages.append(call.error.message)

    def check(self, error: TierKVError, calls: int) -> None:
        """Decide after a failure among ``calls`` whether the statement goes on.

        Raises:
            TierKVError: the failure is one too many.
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
        """Return the warning about them, if there are any."""
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
    """Return how many tokens a request can have generated; readouts generate none."""
    if prepared.call.labels or prepared.call.embed:
        return 0
    return prepared.request.sampling.max_tokens
