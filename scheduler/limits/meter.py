"""The contract of the meters: buckets in this process, or in Valkey for several fronts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tierkv.scheduler.limits.buckets import Charge, Taken


class LimitMeter(Protocol):
    """Takes from buckets. Used from one event loop.

    1. ``take`` takes all charges or none: none if one would have to wait longer than
       ``patience_s``. It sleeps for nobody: the caller waits.
    2. ``give_back`` puts back what was taken and not used; a failure is only logged.
    3. ``left`` returns what each charge's bucket has now, negative in debt.
    4. ``take`` and ``left`` raise SharedStateLostError without an answer; whether anything was
       taken is then unknown.
    """

    async def take(self, charges: Sequence[Charge], patience_s: float) -> Taken: ...

    async def give_back(self, charges: Sequence[Charge]) -> None: ...

    async def left(self, charges: Sequence[Charge]) -> list[float]: ...

    async def close(self) -> None: ...
