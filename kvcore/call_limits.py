"""Limits of AI calls: how many requests and tokens a tenant, a namespace or a REST key may use.

Pure values. A DBA sets limits (dbfront/statement/limit_change.py), the meta server keeps limits as
records, and every front obeys (scheduler/limits/gate.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

RECORD_KIND: Final = "limit"
"""Kind of the records that hold limits (metaserver/client.py::Record)."""

_PERIODS: Final = {"s": 1.0, "min": 60.0, "h": 3_600.0, "day": 86_400.0}
_MULTIPLES: Final = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([KMG]?) ?/ ?(s|min|h|day)", re.IGNORECASE)
_MOST: Final = 1e15


class SubjectKind(StrEnum):
    """What a limit applies to. A SQL user is a tenant."""

    TENANT = "tenant"
    NAMESPACE = "namespace"
    KEY = "key"


class WhenLost(StrEnum):
    """The fate of calls with limits while the shared buckets can't be reached."""

    AUTO = "auto"
    """Refused if a limit is per hour or day, otherwise admitted."""
    REFUSE = "refuse"
    ADMIT = "admit"


@dataclass(frozen=True, slots=True)
class Subject:
    """Whom a limit applies to: one tenant, one namespace or one REST key."""

    kind: SubjectKind
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class CallRate:
    """An amount per period, as in ``50/s`` and ``1M/day``.

    Attributes:
        amount: requests or tokens; more than 0.
        period_s: seconds; one of the periods that ``rate`` reads.
    """

    amount: float
    period_s: float

    @property
    def per_s(self) -> float:
        """Requests or tokens per second."""
        return self.amount / self.period_s

    def __str__(self) -> str:
        unit = next(unit for unit, seconds in _PERIODS.items() if seconds == self.period_s)
        for letter, multiple in reversed(_MULTIPLES.items()):
            if self.amount >= multiple and self.amount % multiple == 0.0:
                return f"{self.amount / multiple:g}{letter}/{unit}"
        return f"{self.amount:g}/{unit}"


def rate(text: str) -> CallRate:
    """Read ``50/s``, ``600/min``, ``10K/h`` or ``1M/day``.

    Raises:
        ValueError: the text is no rate, or its amount is 0 or too large.
    """
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise ValueError("is no rate; write 50/s, 600/min, 10K/h or 1M/day")
    amount = float(found[1]) * _MULTIPLES[found[2].upper()]
    if not 0.0 < amount <= _MOST:
        raise ValueError(f"must be above 0 and at most {_MOST:g}")
    return CallRate(amount, _PERIODS[found[3].lower()])


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What one subject may use.

    Attributes:
        requests: AI calls; None: no limit.
        prompt_tokens: tokens of prompts, cached or not; None: no limit.
        completion_tokens: generated tokens; a running call counts with the call's ``max_tokens``.
        burst: requests that may come at once after a pause; 0: as many as in one period.
        max_priority: most urgent priority that calls may have (a lower number is more urgent);
            None: any.
        max_in_flight: calls at a time, at each worker of a front; 0: no limit.
        smooth: calls leave evenly spaced instead of in bursts, and REST calls wait for their turn
            instead of being refused.
        weight: share of the turns of waiting calls, relative to tenants with another weight; 0: as
            the tenant's namespace, or 1.
    """

    requests: CallRate | None = None
    prompt_tokens: CallRate | None = None
    completion_tokens: CallRate | None = None
    burst: int = 0
    max_priority: int | None = None
    max_in_flight: int = 0
    smooth: bool = False
    weight: int = 0

    def to_json(self) -> str:
        """Return the text of a record."""
        return json.dumps(
            {name: value for name, value in asdict(self).items() if value is not None}
        )

    @classmethod
    def from_json(cls, text: str) -> CallLimits:
        """Read the text of a record; what a later release added is left alone.

        Raises:
            ValueError: the text is not that of limits.
        """
        known = {field.name for field in fields(cls)}
        try:
            found = {k: v for k, v in json.loads(text).items() if k in known}
            for name in ("requests", "prompt_tokens", "completion_tokens"):
                if found.get(name) is not None:
                    found[name] = CallRate(**found[name])
            return cls(**found)
        except (TypeError, AttributeError) as error:
            raise ValueError(str(error)) from error


def record_name(subject: Subject) -> str:
    """Return the name of the subject's record."""
    return f"{subject.kind}:{subject.name}"


def limits_of(records: Iterable[Any]) -> dict[Subject, CallLimits]:
    """Return the limits among records; unreadable records are left out.

    Args:
        records: have ``kind``, ``name`` and ``body``.
    """
    found: dict[Subject, CallLimits] = {}
    for record in records:
        if record.kind != RECORD_KIND:
            continue
        kind, _, name = record.name.partition(":")
        try:
            found[Subject(SubjectKind(kind), name)] = CallLimits.from_json(record.body)
        except ValueError:
            continue  # Of a later release; an older front can't know what it means.
    return found
