"""Plots of simulations, drawn with matplotlib in the format of the file's ending.

Called by ``tierkv simulate --plot``. matplotlib is an optional package and is imported when the
first plot is drawn; without matplotlib the error names the cure.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tierkv.kvcore.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BUCKETS: Final = 60
SMALL_S: Final = 0.01
"""Times below this value are drawn as this value: the axis is logarithmic."""


def new_figure(panels: int) -> Figure:
    """Return an empty figure with room for the given number of panels side by side.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:  # Optional, and slow to import.
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed",
            hint="Run `pip install 'tierkv[plot]'`.",
        ) from None
    # The same plot must give the same file, and text stays text.
    matplotlib.rcParams["svg.hashsalt"] = "tierkv"
    matplotlib.rcParams["svg.fonttype"] = "none"
    return Figure(figsize=(5.2 * panels, 3.6), layout="constrained")


def check_format(file: Path) -> None:
    """Refuse a file whose ending is not a format that can be drawn.

    Raises:
        ConfigError: the format is unknown, or matplotlib is not installed.
    """
    known = new_figure(1).canvas.get_supported_filetypes()
    if file.suffix.removeprefix(".") not in known:
        raise ConfigError(
            f"can't draw {file}: {file.suffix or 'no ending'} is no picture format",
            hint="Name a file that ends in .svg, .png or .pdf.",
        )


def save_figure(figure: Figure, file: Path) -> None:
    """Write a figure in the format of the file's ending, already checked by ``check_format``.

    Raises:
        ConfigError: the file can't be written.
    """
    dateless = {"Date": None} if file.suffix in (".svg", ".pdf") else None
    try:
        figure.savefig(file, metadata=dateless)
    except OSError as error:
        raise ConfigError(f"can't write {file}: {error.strerror}") from None


def plot_cluster(
    file: Path, arrivals_s: Sequence[float], ttfts_s: Sequence[float], *, title: str
) -> None:
    """Draw the distribution of times to the first token, and their course over time."""
    figure = new_figure(2)
    figure.suptitle(title, fontsize=10)
    spread, course = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    draw_distribution(spread, ttfts_s, label="")
    pairs = sorted(zip(arrivals_s, ttfts_s, strict=True))
    for share, label in ((0.5, "median"), (0.9, "P90")):
        xs, ys = _course(pairs, share)
        course.plot(xs, ys, label=label)
    course.set(xlabel="time of arrival, s", ylabel="TTFT, s", yscale="log")
    course.grid(alpha=0.3)
    course.legend()
    save_figure(figure, file)


def draw_distribution(axes: Axes, ttfts_s: Sequence[float], *, label: str) -> None:
    """Draw one line: the share of requests with a first token within each time."""
    ordered = [max(SMALL_S, ttft) for ttft in sorted(ttfts_s)]
    shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
    step = max(1, len(ordered) // 500)
    axes.plot([*ordered[::step], *ordered[-1:]], [*shares[::step], *shares[-1:]], label=label)
    axes.set(xlabel="TTFT, s", ylabel="share of requests", xscale="log", ylim=(0, 1))
    axes.grid(alpha=0.3)


def plot_hit_rates(
    file: Path, capacities: Sequence[int], rates: Sequence[float], *, title: str
) -> None:
    """Draw the hit rate of one cache over its size."""
    figure = new_figure(1)
    axes = figure.add_subplot(1, 1, 1)
    axes.plot(capacities, rates, marker="o")
    axes.set(title=title, xlabel="capacity, blocks", ylabel="token hit rate", xscale="log")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    save_figure(figure, file)


def _course(pairs: Sequence[tuple[float, float]], share: float) -> tuple[list[float], list[float]]:
    """Return a quantile of TTFT per time bucket."""
    if not pairs:
        return [], []
    start_s, width_s = pairs[0][0], max(1e-9, (pairs[-1][0] - pairs[0][0]) / BUCKETS)
    buckets: dict[int, list[float]] = {}
    for at_s, ttft_s in pairs:
        buckets.setdefault(min(BUCKETS - 1, int((at_s - start_s) / width_s)), []).append(ttft_s)
    xs, ys = [], []
    for bucket, ttfts_s in sorted(buckets.items()):
        ttfts_s.sort()
        xs.append(start_s + (bucket + 0.5) * width_s)
        ys.append(max(SMALL_S, ttfts_s[min(len(ttfts_s) - 1, int(share * len(ttfts_s)))]))
    return xs, ys
