"""How often prompts went to where their blocks are, and what that left unused: counters by model.

Written by scheduler/dispatcher.py, read by the admin view stat_scheduler. Nothing here decides
anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from tierkv.scheduler.events import CandidateCost


@dataclass(slots=True)
class AffinityCounts:
    """Counters of one model since the front started.

    Attributes:
        decisions: sends of a prompt to a node, again after a loss included.
        affinity_hit: of those with a choice, to the node that had most of it near.
        affinity_miss: no node had any of it near.
        load_override: another node had more, but would have cost more.
        matched_tokens: prompt tokens worth reusing where most of them were.
        predicted_tokens: prompt tokens expected to be reused at the chosen node.
        queued: waits for room at a node.
        queue_time: milliseconds of these.
    """

    decisions: int = 0
    affinity_hit: int = 0
    affinity_miss: int = 0
    load_override: int = 0
    matched_tokens: int = 0
    predicted_tokens: int = 0
    queued: int = 0
    queue_time: float = 0.0

    def decided(self, candidates: Sequence[CandidateCost], block_tokens: int) -> None:
        """Count a decision.

        Near is what lies in a node's pages or on its host (L1 and L2); what is further away is as
        far from every node.

        Args:
            candidates: those that were weighed, the chosen one first.
            block_tokens: of the model's blocks.
        """
        self.decisions += 1
        if len(candidates) == 1:
            matched = block_tokens * candidates[0].cost.service.reused_blocks
            self.matched_tokens += matched
            self.predicted_tokens += matched
            return
        plans = [candidate.cost.service for candidate in candidates]
        self.matched_tokens += block_tokens * max(plan.reused_blocks for plan in plans)
        self.predicted_tokens += block_tokens * plans[0].reused_blocks
        near = [plan.tier_blocks[0] + plan.tier_blocks[1] for plan in plans]
        most = max(near)
        self.affinity_miss += most == 0
        self.affinity_hit += 0 < most == near[0]
        self.load_override += near[0] < most

    def waited(self, seconds: float) -> None:
        """Count a wait."""
        self.queued += 1
        self.queue_time += 1000 * seconds


class Affinity:
    """The counters of all models."""

    def __init__(self) -> None:
        self._models: dict[str, AffinityCounts] = {}

    def of(self, model: str) -> AffinityCounts:
        """Return a model's counters."""
        counts = self._models.get(model)
        if counts is None:
            counts = self._models[model] = AffinityCounts()
        return counts

    def counts(self) -> Mapping[str, Mapping[str, float]]:
        """Return all numbers by model, as they are now."""
        return {model: asdict(counts) for model, counts in self._models.items()}
