"""The plot of docs/quality.md: answers by share recomputed, a small SVG without a library.

Called by bench.quality; pure. Two panels, exact match and mean divergence from the full recompute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from bench.blend_quality import Measured
from bench.codec_quality import Quality
from bench.quality_table import methods, points

COLOURS: Final = ("#b2182b", "#2166ac", "#1b7837", "#762a83", "#e08214", "#555555", "#01665e")
WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 250, 60, 40, 70
LEAST_KL, MOST_KL = 1e-4, 3.0


def render_plot(measured: Measured) -> str:
    """Return the SVG."""
    names = methods(measured)
    height = HEIGHT + TOP + 60 + 20 * -(-len(names) // 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH + LEFT + GAP + 30}" '
        f'height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    full = measured.full.exact_match
    parts += _panel(measured, LEFT, "exact match", _exact_match, (0.0, 0.25, 0.5, 0.75, 1.0))
    y = _exact_match(full)
    parts.append(f'<path d="M{LEFT} {y:.1f}h{WIDTH}" stroke="#000000" stroke-dasharray="4 3"/>')
    right = LEFT + WIDTH + GAP
    title = "mean KL to full recompute, nats"
    parts += _panel(measured, right, title, _divergence, (1e-4, 1e-3, 1e-2, 0.1, 1.0))
    for i, name in enumerate(names):
        x, y = LEFT + i % 3 * 230, HEIGHT + TOP + 60 + 20 * (i // 3)
        parts.append(f'<rect x="{x}" y="{y - 9}" width="14" height="10" fill="{COLOURS[i]}"/>')
        parts.append(f'<text x="{x + 19}" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    measured: Measured,
    left: int,
    title: str,
    y_of: Callable[[float], float],
    ticks: tuple[float, ...],
) -> list[str]:
    parts = [f'<text x="{left}" y="{TOP - 14}">{title}</text>']
    for tick in ticks:
        y = y_of(tick)
        parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = left + share * WIDTH
        parts.append(
            f'<text x="{x}" y="{HEIGHT + TOP + 18}" text-anchor="middle">{share:.0%}</text>'
        )
    middle = left + WIDTH / 2
    label = "share of reused tokens computed again"
    parts.append(f'<text x="{middle}" y="{HEIGHT + TOP + 36}" text-anchor="middle">{label}</text>')
    value = _exact_of if y_of is _exact_match else _kl_of
    for colour, name in zip(COLOURS, methods(measured), strict=False):
        path = " ".join(
            f"{left + ratio * WIDTH:.1f},{y_of(value(quality)):.1f}"
            for ratio, quality in points(measured, name)
        )
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return parts


def _exact_of(quality: Quality) -> float:
    return quality.exact_match


def _kl_of(quality: Quality) -> float:
    return quality.kl_mean


def _exact_match(value: float) -> float:
    return TOP + HEIGHT * (1 - value)


def _divergence(value: float) -> float:
    low, high = math.log(LEAST_KL), math.log(MOST_KL)
    return TOP + HEIGHT * (1 - (math.log(min(max(value, LEAST_KL), MOST_KL)) - low) / (high - low))
