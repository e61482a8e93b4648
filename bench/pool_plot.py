"""The plot of docs/performance.md: throughput by value size, a small SVG without a library.

Called by bench.pool; pure. Two panels, get and put of single values by one thread, logarithmic.
"""

from __future__ import annotations

import math
from typing import Final

from bench.pool_cell import Cell, size_name
from bench.pool_run import Results

SERIES: Final = {
    "memcpy": ("memcpy", "#999999"),
    "shm": ("TierKV shm", "#1b7837"),
    "raw": ("raw socket", "#555555"),
    "tcp": ("TierKV tcp", "#2166ac"),
    "redis": ("Redis", "#b2182b"),
    "mooncake": ("Mooncake TCP", "#e08214"),
}
WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 260, 50, 40, 60
TICKS: Final = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def render_plot(results: Results) -> str:
    """Return the SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH + 2 * LEFT + GAP}" '
        f'height="{HEIGHT + TOP + 70}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for i, op in enumerate(("get", "put")):
        parts += _panel(results, op, LEFT + i * (WIDTH + GAP))
    for i, (label, colour) in enumerate(SERIES.values()):
        x, y = LEFT + i * 120, HEIGHT + TOP + 52
        parts.append(f'<rect x="{x}" y="{y - 9}" width="14" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 19}" y="{y}">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(results: Results, op: str, left: int) -> list[str]:
    cells = sorted(
        (c for c in results.rounds if (c.op, c.batch, c.threads) == (op, 1, 1)),
        key=lambda cell: cell.size,
    )
    parts = [f'<text x="{left}" y="{TOP - 14}">{op}, one value, one thread: GB/s</text>']
    for tick in TICKS:
        y = _y(tick)
        parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for i, cell in enumerate(cells):
        x = _x(left, i, len(cells))
        label = size_name(cell.size)
        parts.append(f'<text x="{x}" y="{HEIGHT + TOP + 18}" text-anchor="middle">{label}</text>')
    for name, (_, colour) in SERIES.items():
        parts += _line(results, cells, name, colour, left)
    return parts


def _line(results: Results, cells: list[Cell], name: str, colour: str, left: int) -> list[str]:
    points = [
        (_x(left, i, len(cells)), _y(speed / 1e9))
        for i, cell in enumerate(cells)
        if (speed := results.speed(cell, name))
    ]
    path = " ".join(f"{x},{y:.1f}" for x, y in points)
    dots = [f'<circle cx="{x}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>', *dots]


def _x(left: int, index: int, count: int) -> int:
    return left + 25 + index * (WIDTH - 50) // max(1, count - 1)


def _y(value: float) -> float:
    low, high = math.log(TICKS[0] * 0.8), math.log(TICKS[-1] * 1.5)
    part = (math.log(max(value, TICKS[0] * 0.8)) - low) / (high - low)
    return TOP + HEIGHT * (1 - min(part, 1.0))
