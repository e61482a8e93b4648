"""Markdown tables of the quality benchmarks.

Called by bench.quality; pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from bench.blend_quality import NOTHING, Measured, Way
from bench.codec_quality import Quality


def codec_table(groups: Mapping[str, Mapping[str, Quality]]) -> str:
    """Return the codecs as rows; each group of probes has four columns.

    Args:
        groups: name of a group to quality by codec (``full`` first).
    """
    head, names = ["", "bits"], list(next(iter(groups.values())))
    for group in groups:
        head += [f"{group}: exact match", "agreement", "KL mean", "KL max"]
    rows = []
    for name in names:
        found = [group[name] for group in groups.values()]
        if name == "full":
            rows.append(["full recompute", "", *_columns(found, ("exact_match",), 4)])
        else:
            rows.append([f"`{name}`", f"{found[0].bits:.1f}", *_columns(found, _ALL, 4)])
    return _table(head, rows)


_ALL = ("exact_match", "agreement", "kl_mean", "kl_max")


def _columns(found: Iterable[Quality], names: Sequence[str], width: int) -> list[str]:
    cells: list[str] = []
    for quality in found:
        numbers = [_number(getattr(quality, name), name) for name in names]
        cells += numbers + [""] * (width - len(numbers))
    return cells


def _number(value: float, name: str) -> str:
    if name.startswith("kl"):
        return f"{value:.1e}" if value > 1e-9 else "0"
    return f"{value:.3f}"


def blend_table(measured: Measured) -> str:
    """Return methods as rows and ratios as columns: exact match and mean KL."""
    ratios = sorted({way.ratio for way in measured.by_way if way.ratio > NOTHING})
    rows = [[name, _cell(q)] + [""] * len(ratios) for name, q in _without_ratio(measured)]
    for name in methods(measured):
        cells = [_cell(measured.by_way[way]) for way in _ways_of(measured, name)]
        rows.append([name, "", *cells])
    head = ["", "r = 0", *[f"{ratio:.0%}" for ratio in ratios]]
    return _table(head, rows)


def methods(measured: Measured) -> list[str]:
    """Return the names of the ways that have ratios."""
    return list(dict.fromkeys(way.name for way in measured.by_way if way.ratio > NOTHING))


def points(measured: Measured, name: str) -> list[tuple[float, Quality]]:
    """Return a method's quality by ratio."""
    return [(way.ratio, measured.by_way[way]) for way in _ways_of(measured, name)]


def _ways_of(measured: Measured, name: str) -> list[Way]:
    return sorted((w for w in measured.by_way if w.name == name), key=lambda way: way.ratio)


def _without_ratio(measured: Measured) -> list[tuple[str, Quality]]:
    ways = [way for way in measured.by_way if way.ratio <= NOTHING]
    return [(f"all reused, {way.name}", measured.by_way[way]) for way in ways]


def _cell(quality: Quality) -> str:
    divergence = f"{quality.kl_mean:.2g}" if quality.kl_mean > 1e-9 else "0"
    return f"{quality.exact_match:.2f}, {divergence}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
