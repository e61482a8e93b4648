"""What is known of an AI call while it runs and once it ended.

Written by dbfront/generation/generation.py; read by the metrics, the logs and ``stat_activity``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tierkv.dbfront.contracts import PreparedCall
from tierkv.kvcore.ids import RequestId
from tierkv.kvcore.request import Usage


class Outcome(StrEnum):
    """How a call ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A call that ended, for metrics and logs.

    ``error_code`` is set when it failed, ``origin`` when it came by REST.
    """

    request_id: RequestId
    model: str
    tenant: str
    outcome: Outcome
    usage: Usage | None
    ttft_s: float
    total_s: float
    node_id: str = ""
    error_code: str = ""
    origin: str = ""


@dataclass(slots=True)
class LiveCall:
    """A call that is being answered, for ``stat_activity``.

    Attributes:
        prepared: what was asked.
        started_s: monotonic start.
        started_wall_s: the same for people.
        completion_tokens: tokens so far.
        ttft_s: 0.0 until the first token; at the end a statement's calls have the node's.
        node_id: who answers; empty until the first token.
        usage: set at the end.
        outcome: how it ended; CANCELLED until it is known.
        error_code: of the error that ended it.
    """

    prepared: PreparedCall
    started_s: float
    started_wall_s: float
    completion_tokens: int = 0
    ttft_s: float = 0.0
    node_id: str = ""
    usage: Usage | None = None
    outcome: Outcome = Outcome.CANCELLED
    error_code: str = ""
