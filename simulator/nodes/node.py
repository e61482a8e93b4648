"""One node of the simulated cluster: a queue of prompts, one prefill at a time, many answers.

Driven by simulator/cluster.py, read by the routers. A node computes the end times; the cluster's
event queue makes the ends happen.
"""

from __future__ import annotations

from collections import deque

from tierkv.simulator.nodes.job import SimulatedRequest
from tierkv.simulator.nodes.prefix_cache import PrefixCache
from tierkv.simulator.nodes.serving_model import NodeConstants

DONE_WITHIN_S = 1e-3
"""Remaining time at which an answer counts as ended: delays are added in ever smaller steps."""


class SimNode:
    """A node's queue and accounts.

    Attributes:
        index: number of the node.
        cache: the node's memory for KV.
        queue: waiting prompts, the next prompt first.
        running: the prompt being computed.
        free_s: end time of the running prefill.
        outstanding: requests of the node with an unfinished answer.
        queued_tokens: predicted tokens to compute, over all requests without a first token.
        queued_s: predicted seconds of prefill, over all requests in the queue.
        active_blocks: blocks of all requests of the node.
        busy_s: seconds of finished prefills.
        decoding: number of answers in generation.
    """

    def __init__(self, index: int, cache: PrefixCache, constants: NodeConstants) -> None:
        self.index = index
        self.cache = cache
        self.queue: deque[SimulatedRequest] = deque()
        self.running: SimulatedRequest | None = None
        self.free_s = 0.0
        self.outstanding = 0
        self.queued_tokens = 0
        self.queued_s = 0.0
        self.active_blocks = 0
        self.busy_s = 0.0
        self.decoding = 0
        self._constants = constants
        self._undecoded: deque[SimulatedRequest] = deque()

    def take(self, job: SimulatedRequest) -> None:
        """Put a job into the queue."""
        self.queue.append(job)
        self.outstanding += 1
        self.queued_tokens += job.expected_tokens
        self.queued_s += job.expected_s
        self.active_blocks += len(job.prompt.blocks) + 1

    def work_s(self, now: float) -> float:
        """Return the predicted seconds of computing until a new job's turn."""
        rest_s = max(0.0, self.free_s - now) if self.running is not None else 0.0
        return rest_s + self.queued_s

    def start(self, job: SimulatedRequest, now: float, end_s: float) -> None:
        """Compute the job at the head of the queue until ``end_s``."""
        assert self.running is None and self.queue[0] is job
        self.queue.popleft()
        self.queued_s -= job.expected_s
        self.running = job
        job.started_s, self.free_s = now, end_s

    def finish_prefill(self, now: float) -> SimulatedRequest:
        """End the running prefill."""
        job = self.running
        assert job is not None
        self.running = None
        self.queued_tokens -= job.expected_tokens
        self.busy_s += now - job.started_s
        job.first_token_s = now
        return job

    def start_answer(self, job: SimulatedRequest, now: float, tpot_s: float) -> float | None:
        """Continue an answer after its first token.

        Returns:
            time to check whether the answer has ended; None while all slots are taken.
        """
        if self.decoding >= self._constants.decode_slots:
            self._undecoded.append(job)
            return None
        self.decoding += 1
        job.decode_from_s, job.decode_busy_s = now, self._busy_until(now)
        return now + (job.prompt.output_tokens - 1) * tpot_s

    def rest_of_answer_s(self, job: SimulatedRequest, now: float, tpot_s: float) -> float:
        """Return the remaining seconds of an answer.

        Each second of concurrent prefill delays the answer by a share of a second.
        """
        beside_s = self._busy_until(now) - job.decode_busy_s
        done_s = now - job.decode_from_s - self._constants.decode_harm * beside_s
        rest_s = (job.prompt.output_tokens - 1) * tpot_s - done_s
        return rest_s if rest_s > DONE_WITHIN_S else 0.0

    def finish_answer(self, job: SimulatedRequest) -> SimulatedRequest | None:
        """End an answer.

        Returns:
            the next job, which gets the free slot.
        """
        self.decoding -= 1
        self.outstanding -= 1
        self.active_blocks -= len(job.prompt.blocks) + 1
        return self._undecoded.popleft() if self._undecoded else None

    def _busy_until(self, now: float) -> float:
        return self.busy_s + (now - self.running.started_s if self.running is not None else 0.0)
