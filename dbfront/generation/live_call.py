"""A request to a model while it is being answered.

Filled by dbfront/generation/generation.py as events come; when the request is over, ``ended`` makes
its event for the accounts, in this one place.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.dbfront.accounts.ended_call import CallEnd, EndedRequest, kind_of
from tierkv.dbfront.contracts import PreparedCall
from tierkv.kvcore.request import Usage


@dataclass(slots=True)
class LiveCall:
    """A request that is being answered.

    Attributes:
        prepared: what was asked.
        started_s: monotonic start.
        completion_tokens: tokens so far.
        ttft_s: 0.0 until the first token; at the end a statement's calls have the node's.
        node_id: which node answers; empty until the first token.
        usage: set at the end.
        end: how it ended; CANCELLED until that is known.
        error_code: of the error that ended it.
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
        """Return the event of the request, which is over."""
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
