"""A request to a model in progress.

dbfront/generation/generation.py updates the LiveCall with each event. At the end ``ended`` creates
the event for the accounts; no other code creates EndedRequest.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.dbfront.accounts.ended_call import CallEnd, EndedRequest, kind_of
from tierkv.dbfront.contracts import PreparedCall
from tierkv.kvcore.request import Usage


@dataclass(slots=True)
class LiveCall:
    """A request in progress.

    Attributes:
        prepared: the prepared call.
        started_s: monotonic start time.
        completion_tokens: tokens so far.
        ttft_s: 0.0 until the first token. At the end, calls of a statement have the node's
            measurement.
        node_id: the answering node; empty until the first token.
        usage: set at the end.
        end: the way the request ended; CANCELLED until known.
        error_code: code of the error that ended the request.
    """

    prepared: PreparedCall
    started_s: float
    completion_tokens: int = 0
    ttft_s: float = 0.0
    node_id: str = ""
    usage: Usage | None = None
    end: CallEnd = CallEnd.CANCELLED
    error_code: str = ""

    def ended(self, now_s: float) -> EndedRequest:
        """Return the event for the ended request."""
        request, call = self.prepared.request, self.prepared.call
        return EndedRequest(
            request_id=request.request_id,
            model=request.model,
            tenant=call.tenant,
            kind=kind_of(call),
            origin=call.origin,
            end=self.end,
            usage=self.usage,
            ttft_s=self.ttft_s,
            total_s=now_s - self.started_s,
            node_id=self.node_id,
            error_code=self.error_code,
        )
