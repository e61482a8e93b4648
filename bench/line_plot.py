"""Pictures of the benchmarks: panels of lines side by side, with one legend.

Called by bench.compute, bench.pool and bench.quality, which write pictures into docs/. Drawn with
matplotlib through simulator/plot.py, in the format of the file's ending.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tierkv.simulator.plot import check_format, new_figure, save_figure

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram.

    Attributes:
        title: says what the y axis shows, and its unit.
        lines: points by name; a name has the same colour in all panels.
        ticks: texts by x; empty if numbers serve.
        x_label: what the x axis shows.
        logarithmic: the y axis.
        level: y of a dashed line to compare with; None for no such line.
    """

    title: str
    lines: Mapping[str, Points]
    ticks: Mapping[float, str] = field(default_factory=dict)
    x_label: str = ""
    logarithmic: bool = True
    level: float | None = None


def save_panels(file: Path, panels: Sequence[Panel]) -> None:
    """Draw panels side by side and write the picture.

    Raises:
        ConfigError: matplotlib is missing, the format is unknown, or the file can't be written.
    """
    check_format(file)
    figure = new_figure(len(panels))
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    handles = {}
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(1, len(panels), number)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel(panel.x_label)
        if panel.logarithmic:
            axes.set_yscale("log")
        if panel.ticks:
            axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        if panel.level is not None:
            axes.axhline(panel.level, color="black", linestyle="--", linewidth=1)
        for name, points in panel.lines.items():
            xs, ys = [x for x, _ in points], [y for _, y in points]
            colour = f"C{names.index(name)}"
            (handles[name],) = axes.plot(xs, ys, "o-", color=colour, markersize=3, label=name)
        axes.grid(visible=True, alpha=0.3)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(6, len(names)))
    save_figure(figure, file)
