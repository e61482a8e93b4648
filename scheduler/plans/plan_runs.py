"""Cutting a prefix tree into runs: pieces of the depth-first order, each for one node.

Pure, called by scheduler/plans/plan_state.py. A run stays inside a single subtree where possible,
to compute and keep the shared prefix of the calls on a single node. Runs are small enough to
balance the nodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from tierkv.scheduler.plans.plan_tree import ROOT, PrefixTree

RUNS_PER_NODE = 4
"""Several runs per node; a node that finishes early can take over another node's run."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Cost of calls, in seconds.

    Attributes:
        prefill_s_per_token: computing one prompt token.
        answer_s: generating one answer.
    """

    prefill_s_per_token: float = 1.0
    answer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CallRun:
    """Neighbours ``[first, stop)`` in the depth-first order.

    Attributes:
        stem: the deepest stem common to all calls; its blocks are the run's own prefix.
        work_s: seconds of work, including the computation of this prefix.
    """

    first: int
    stop: int
    stem: int
    work_s: float

    @property
    def calls(self) -> int:
        """Return the number of calls."""
        return self.stop - self.first

    def without_last(self, calls: int) -> tuple[CallRun, CallRun]:
        """Split off the last ``calls`` calls, and return the rest and these calls."""
        middle, work_s = self.stop - calls, self.work_s * calls / self.calls
        return (
            CallRun(self.first, middle, self.stem, self.work_s - work_s),
            CallRun(middle, self.stop, self.stem, work_s),
        )


@dataclass(frozen=True, slots=True)
class _Item:
    """A part of the stem ``within``: a child stem, or (``stem`` None) several calls."""

    first: int
    stop: int
    stem: int | None
    work_s: float
    within: int = ROOT


def cut(tree: PrefixTree, effort: Effort, nodes: int) -> tuple[CallRun, ...]:
    """Cut the tree into runs, in depth-first order.

    A small enough subtree is one run; small neighbours under the same stem form one run together. A
    larger subtree is cut below its shared prefix. The own work of each piece is then at least about
    the cost of computing this prefix once more.

    Args:
        tree: the shared prefixes.
        effort: cost of calls.
        nodes: number of nodes that share the work.
    """
    if not tree.order:
        return ()
    return _Cutter(tree, effort, nodes).runs()


class _Cutter:
    """One cut.

    Attributes:
        below_s: per stem, seconds of its calls without the prefix up to the end of the stem.
        above_s: per stem, seconds to compute the prefix from the root to the end of the stem.
    """

    def __init__(self, tree: PrefixTree, effort: Effort, nodes: int) -> None:
        self.tree = tree
        self.effort = effort
        self.below_s = [0.0] * len(tree.stems)
        self.above_s = [0.0] * len(tree.stems)
        self._children: list[list[int]] = [[] for _ in tree.stems]
        for position in range(len(tree.order)):
            self.below_s[tree.deepest[position]] += self._call_s(position)
        for number in range(len(tree.stems) - 1, ROOT, -1):
            parent = tree.stems[number].parent
            self.below_s[parent] += self.below_s[number] + self._own_s(number)
            self._children[parent].append(number)
        for number in range(1, len(tree.stems)):
            parent = tree.stems[number].parent
            self.above_s[number] = self.above_s[parent] + self._own_s(number)
        self._target_s = self.below_s[ROOT] / (RUNS_PER_NODE * max(1, nodes))

    def runs(self) -> tuple[CallRun, ...]:
        """Visit stems from the root, without recursion: prefixes may be nested deeply."""
        runs: list[CallRun] = []
        stack = [_Item(0, len(self.tree.order), ROOT, self.below_s[ROOT])]
        while stack:
            item = stack.pop()
            if item.stem is None or not self._too_big(item.stem):
                runs.append(self._run(item))
            else:
                pieces = list(self._pieces(item.stem))
                stack += reversed(pieces)
        return tuple(runs)

    def _too_big(self, stem: int) -> bool:
        share_s = max(self._target_s, self.above_s[stem])
        whole = self.tree.stems[stem]
        return self.below_s[stem] > 1.5 * share_s and whole.stop - whole.first > 1

    def _pieces(self, stem: int) -> Iterator[_Item]:
        """Gather a stem's parts into pieces; a part that is too big stays separate."""
        least_s = max(self._target_s, self.above_s[stem])
        first, work_s = self.tree.stems[stem].first, 0.0
        for item in self._items(stem):
            if item.stem is not None and self._too_big(item.stem):
                if first < item.first:
                    yield _Item(first, item.first, None, work_s, stem)
                yield item
                first, work_s = item.stop, 0.0
                continue
            work_s += item.work_s
            if work_s + item.work_s / 2 >= least_s:
                yield _Item(first, item.stop, None, work_s, stem)
                first, work_s = item.stop, 0.0
        if first < self.tree.stems[stem].stop:
            yield _Item(first, self.tree.stems[stem].stop, None, work_s, stem)

    def _items(self, stem: int) -> Iterator[_Item]:
        whole = self.tree.stems[stem]
        at = whole.first
        for child in reversed(self._children[stem]):
            below = self.tree.stems[child]
            yield from (_Item(p, p + 1, None, self._call_s(p)) for p in range(at, below.first))
            work_s = self.below_s[child] + self._own_s(child)
            yield _Item(below.first, below.stop, child, work_s, stem)
            at = below.stop
        yield from (_Item(p, p + 1, None, self._call_s(p)) for p in range(at, whole.stop))

    def _run(self, item: _Item) -> CallRun:
        stem = self.tree.deepest[item.first]
        while self.tree.stems[stem].stop < item.stop:
            stem = self.tree.stems[stem].parent
        work_s = item.work_s + self.above_s[item.within]
        return CallRun(item.first, item.stop, stem, work_s)

    def _own_s(self, stem: int) -> float:
        found = self.tree.stems[stem]
        return found.blocks * found.block_tokens * self.effort.prefill_s_per_token

    def _call_s(self, position: int) -> float:
        return self.tree.own_tokens(position) * self.effort.prefill_s_per_token + (
            self.effort.answer_s
        )


def deal(
    runs: Sequence[CallRun], speeds: Sequence[float], homes: Mapping[int, int] | None = None
) -> list[list[CallRun]]:
    """Deal runs to nodes: first by cached KV, then in proportion to speed.

    Args:
        runs: runs in depth-first order.
        speeds: relative speed of each node.
        homes: per position the node with most of the call's KV; positions without a unique node are
            missing.

    Returns:
        per node its runs, in depth-first order; every position is in exactly one run.
    """
    dealt: list[list[CallRun]] = [[] for _ in speeds]
    homeless: list[CallRun] = []
    for run in runs:
        for home, piece in _by_home(run, homes or {}):
            (homeless if home is None else dealt[home]).append(piece)
    loads_s = [sum(run.work_s for run in hand) for hand in dealt]
    left_s = sum(run.work_s for run in homeless)
    fair_s = (sum(loads_s) + left_s) / sum(speeds)
    lacks_s = [
        max(0.0, fair_s * speed - load_s) for speed, load_s in zip(speeds, loads_s, strict=True)
    ]
    lacked_in_all_s = sum(lacks_s)  # 0.0 too if rounding swallows what is left.
    scale = left_s / lacked_in_all_s if lacked_in_all_s else 0.0
    ends_s = [lacked_s * scale for lacked_s in accumulate(lacks_s)]
    done_s = 0.0
    for run in _cut_at(ends_s, homeless):
        middle_s = done_s + run.work_s / 2
        dealt[min(len(dealt) - 1, bisect_right(ends_s, middle_s))].append(run)
        done_s += run.work_s
    for hand in dealt:
        hand.sort(key=lambda run: run.first)
    return dealt


def _by_home(run: CallRun, homes: Mapping[int, int]) -> Iterator[tuple[int | None, CallRun]]:
    """Cut a run where the home of its calls changes."""
    if not homes:
        yield None, run
        return
    for home, group in groupby(range(run.first, run.stop), homes.get):
        positions = list(group)
        share_s = run.work_s * len(positions) / run.calls
        yield home, CallRun(positions[0], positions[-1] + 1, run.stem, share_s)


def _cut_at(ends_s: Sequence[float], runs: Sequence[CallRun]) -> Iterator[CallRun]:
    """Cut runs where a node's share ends, if the runs before and after have the same prefix.

    The nodes on both sides compute this prefix anyway.
    """
    done_s = 0.0
    for at, run in enumerate(runs):
        rest, end_s = run, done_s + run.work_s
        alike = 0 < at < len(runs) - 1 and runs[at - 1].stem == run.stem == runs[at + 1].stem
        if alike or run.stem == ROOT:
            for share_end_s in ends_s[bisect_right(ends_s, done_s) : bisect_right(ends_s, end_s)]:
                after = round(run.calls * (end_s - share_end_s) / run.work_s)
                if 0 < after < rest.calls:
                    piece, rest = rest.without_last(after)
                    yield piece
        yield rest
        done_s = end_s
