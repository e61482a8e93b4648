"""Seeded request traces for benchmarks without a trace: tenants, sessions that grow, pauses.

The traces are not fitted to any recorded traffic. If published traces are at hand, prefer published
traces (docs/simulate.md names the sources).
"""

from __future__ import annotations

from random import Random

from tierkv.simulator.trace import Request

BLOCK = 512


def agents(sessions: int, *, seed: int, hours: float = 1.0) -> list[Request]:
    """Return sessions whose prompts grow by a few blocks per turn, each with its tenant's head."""
    random = Random(seed)
    made: list[Request] = []
    ids = iter(range(1 << 40))
    heads = [[next(ids) for _ in range(random.randrange(8, 40))] for _ in range(8)]
    for session in range(sessions):
        chain = list(random.choice(heads))
        at_s = random.uniform(0.0, hours * 3600.0)
        for turn in range(1 + int(random.expovariate(1 / 20))):
            chain.extend(next(ids) for _ in range(1 + int(random.expovariate(1 / 6))))
            pause_s = random.expovariate(1 / 12)
            made.append(
                Request(
                    at_s,
                    len(chain) * BLOCK + random.randrange(BLOCK),
                    1 + int(random.expovariate(1 / 300)),
                    tuple(chain),
                    session_id=str(session),
                    turn=turn + 1,
                    think_time_s=pause_s,
                )
            )
            at_s += pause_s + 5.0
    return sorted(made, key=lambda request: request.timestamp_s)
