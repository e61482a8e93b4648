"""How fast an engine is, measured from its answers, for the scheduler's cost.

Used by integrations/remote/node.py. Only requests that had the engine to themselves say what
computing takes; when several run, a first token also waits for others. A time to a first token
holds more than computing, and now and then a stall: of a prompt whose prefix is cached that is
nearly all.
"""

from __future__ import annotations

from tierkv.costing.fit import Rate, StepCostFit
from tierkv.costing.service_time import causal_pairs


class Pace:
    """Fits of one life of an engine.

    Attributes:
        prefill: seconds per step, token and pair of attention.
        prefill_rate: tokens per second.
        decode_rate: tokens per second of one request.
    """

    def __init__(self) -> None:
        self.prefill = StepCostFit(by_seconds=True)
        self.prefill_rate = Rate()
        self.decode_rate = Rate()

    def first_token(self, prompt_tokens: int, cached_tokens: int, seconds: float) -> None:
        """Take in the time to a first token of a request that ran alone."""
        computed = max(1, prompt_tokens - cached_tokens)
        self.prefill.add(computed, causal_pairs(prompt_tokens - computed, computed), seconds)
        self.prefill_rate.add(computed, seconds)

    def decoded(self, tokens: int, seconds: float) -> None:
        """Take in the time from a first token to the last one, and the tokens behind the first."""
        self.decode_rate.add(tokens, seconds)
