"""Tell the story of one seed: ``make sim SEED=123``, or ``python -m tests.sim.run 123``.

A seed that breaks a rule prints its story up to there, then the assertion.
"""

from __future__ import annotations

import sys
from collections import Counter

from tests.sim.world import World


def main(seed: int) -> None:
    """Play a seed and print what happened."""
    world = World(seed)
    try:
        outcome = world.play()
    except BaseException:
        print("\n".join(world.net.story))
        print(f"at {world.net.now - 1_000:.3f} s, seed {seed}:")
        raise
    print("\n".join(outcome.story))
    print(f"seed {seed}: requests {_line(outcome.ended)}; {_line(outcome.counts)}")


def _line(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
