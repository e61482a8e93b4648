"""The plot of TTFT by round in docs/performance.md, a small SVG without a library.

Called by bench.compute; pure. A panel per length of history, logarithmic, a line per tier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from bench.compute_ttft import History

COLOURS: Final = {
    "off": "#b2182b", "L1": "#1b7837", "L2": "#5aae61", "L3": "#2166ac", "L4": "#e08214",
}  # fmt: skip
WIDTH, HEIGHT, LEFT, TOP, GAP = 230, 240, 55, 40, 45
TICKS: Final = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


def render_plot(histories: Sequence[History]) -> str:
    """Return the SVG."""
    width = LEFT + len(histories) * (WIDTH + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT + TOP + 70}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, history in enumerate(histories):
        parts += _panel(history, LEFT + i * (WIDTH + GAP))
    for i, (label, colour) in enumerate(COLOURS.items()):
        x, y = LEFT + i * 80, HEIGHT + TOP + 52
        parts.append(f'<rect x="{x}" y="{y - 9}" width="14" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 19}" y="{y}">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(history: History, left: int) -> list[str]:
    rounds = len(history.tiers["L1"])
    parts = [
        f'<text x="{left}" y="{TOP - 14}">{history.tokens:,} tokens of history: TTFT, s</text>'
    ]
    for tick in TICKS:
        y = _y(tick)
        parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for number in range(rounds):
        x = _x(left, number, rounds)
        label = f'<text x="{x}" y="{HEIGHT + TOP + 18}" text-anchor="middle">{number + 1}</text>'
        parts.append(label)
    parts += _line(history.off, rounds, COLOURS["off"], left)
    for tier, times in history.tiers.items():
        parts += _line(dict(enumerate(times)), rounds, COLOURS[tier], left)
    return parts


def _line(times: dict[int, float], rounds: int, colour: str, left: int) -> list[str]:
    points = [(_x(left, number, rounds), _y(seconds)) for number, seconds in times.items()]
    path = " ".join(f"{x},{y:.1f}" for x, y in points)
    dots = [f'<circle cx="{x}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>', *dots]


def _x(left: int, index: int, count: int) -> int:
    return left + 15 + index * (WIDTH - 30) // max(1, count - 1)


def _y(seconds: float) -> float:
    low, high = math.log(TICKS[0]), math.log(TICKS[-1])
    part = (math.log(max(seconds, TICKS[0])) - low) / (high - low)
    return TOP + HEIGHT * (1 - min(part, 1.0))
