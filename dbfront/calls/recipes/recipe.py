"""What a recipe is: a generator that asks, is told the answers, and returns the function's value.

dbfront/calls/evaluation.py runs the recipes of all calls of a batch side by side, so that what they
ask at the same time is planned as one. A recipe never awaits and never sees a node.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from tierkv.dbfront.call_defaults import CallDefaults
from tierkv.dbfront.contracts import TextAnswer, TextCall, TokenCounts
from tierkv.sql.calls.ai_call import AiCall


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks the models; the recipe goes on with the answers, in the same order."""

    calls: tuple[TextCall, ...]


@dataclass(frozen=True, slots=True)
class CountTokens:
    """Asks how long texts are for a model; the recipe goes on with TokenCounts."""

    texts: tuple[str, ...]
    model: str | None


Step = Ask | CountTokens
Reply = Sequence[TextAnswer] | TokenCounts
Recipe = Generator[Step, Any, Any]
"""Yields steps, is sent a Reply for each, returns the function's value; None is NULL."""


@dataclass(frozen=True, slots=True)
class Order:
    """One call to answer.

    Attributes:
        call: the call.
        defaults: what the session adds.
        context: its order-free fields as text, in the order chosen for the batch.
    """

    call: AiCall
    defaults: CallDefaults
    context: str = ""
