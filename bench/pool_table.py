"""Output of the pool benchmark: metrics, Markdown tables, and the aims with met or missed.

Called by bench.pool; pure. A ratio is the median over rounds of two contenders measured in
sequence, and may differ from the quotient of the two medians in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from bench.pool_cell import Cell, size_name
from bench.pool_run import Results
from bench.report import render_number

MIB = 1 << 20
REDIS = ("redis", "redis_pipe")


@dataclass(frozen=True, slots=True)
class Aim:
    """A target over several cells.

    Attributes:
        text: the target in words.
        values: per cell, the number to compare; cells without a measurement are left out.
        limit: the limit for each value.
        at_most: True if the values should stay below the limit, not above.
        failed: cells in which our contender failed and the other was measured. They miss the aim.
    """

    text: str
    values: dict[Cell, float]
    limit: float
    at_most: bool = False
    failed: tuple[Cell, ...] = ()

    def met_by(self, value: float) -> bool:
        """Return whether a value meets the limit."""
        return value <= self.limit if self.at_most else value >= self.limit

    @property
    def met(self) -> int:
        """Number of cells that meet the limit."""
        return sum(map(self.met_by, self.values.values()))

    @property
    def worst(self) -> Cell:
        """The cell furthest from the limit."""
        pick = max if self.at_most else min
        return pick(self.values, key=lambda cell: self.values[cell])

    def verdict(self) -> str:
        """Return met or missed, the number of cells, and the worst cell."""
        if not self.values and not self.failed:
            return "not measured"
        cells = len(self.values) + len(self.failed)
        said = "met" if self.met == cells else "missed"
        if self.failed:
            worst = f"failed at {', '.join(cell.name for cell in self.failed)}"
        else:
            worst = f"worst {render_number(self.values[self.worst])} at {self.worst.name}"
        return f"{said}: {self.met} of {cells} cells; {worst}"


def aims(results: Results) -> list[Aim]:
    """Compare a run with the targets of the pool."""
    cells = list(results.rounds)
    large = [cell for cell in cells if cell.size >= MIB]
    small = [c for c in cells if (c.op, c.size, c.batch, c.threads) == ("get", 64 << 10, 1, 1)]
    gets = [cell for cell in cells if cell.op == "get" and cell.batch == 1 and cell.threads == 1]

    def over(chosen: Iterable[Cell], value: Callable[[Cell], float | None]) -> dict[Cell, float]:
        found = {cell: value(cell) for cell in chosen}
        return {cell: number for cell, number in found.items() if number is not None}

    def against(
        text: str, chosen: Sequence[Cell], ours: str, other: Callable[[Cell], str], limit: float,
        which: str = "bytes_per_s", *, at_most: bool = False,
    ) -> Aim:  # fmt: skip
        values = over(chosen, lambda cell: results.ratio(cell, ours, other(cell), which))
        failed = tuple(
            cell
            for cell in chosen
            if results.speed(cell, ours) is None and results.speed(cell, other(cell)) is not None
        )
        return Aim(text, values, limit, at_most, failed)

    return [
        against("tcp: 0.9 of the raw socket from 1 MiB up", large, "tcp", lambda _: "raw", 0.9),
        against("tcp: ahead of Mooncake over TCP at every size",
                cells, "tcp", lambda _: "mooncake", 1.0),
        against("tcp: ahead of Redis at every size",
                cells, "tcp", lambda cell: results.best(cell, REDIS), 1.0),
        against("tcp: 64 KiB get, p50 at most 1.5 raw round trips",
                small, "tcp", lambda _: "raw", 1.5, "p50_s", at_most=True),
        Aim("shm: get without copy, p50 in us below 5",
            over(gets, lambda c: _us(results.latency(c, "shm_view", "p50_s"))), 5.0, at_most=True),
        against("shm: get with copy, 0.9 of memcpy",
                [c for c in cells if c.op == "get"], "shm", lambda _: "memcpy", 0.9),
        against("L4: 0.9 of fio", cells, "l4", lambda _: "fio", 0.9),
    ]  # fmt: skip


def metrics(results: Results) -> Iterator[tuple[str, float]]:
    """Yield every number with a name."""
    for cell, rounds in results.rounds.items():
        for name in rounds:
            yield f"{name}_{cell.name}_gb_per_s", (results.speed(cell, name) or 0.0) / 1e9
            for which in ("p50", "p99"):
                latency = results.latency(cell, name, f"{which}_s") or 0.0
                yield f"{name}_{cell.name}_{which}_us", latency * 1e6
        for name, other in _pairs(results, cell):
            ratio = results.ratio(cell, name, other)
            if ratio is not None:
                yield f"{name}_of_{other}_{cell.name}", ratio
    for aim in aims(results):
        if aim.values or aim.failed:
            yield f"aim {aim.text}: cells met", aim.met
            yield f"aim {aim.text}: cells", len(aim.values) + len(aim.failed)


def _pairs(results: Results, cell: Cell) -> list[tuple[str, str]]:
    redis = results.best(cell, REDIS)
    return [
        ("stripped", redis),
        ("tcp", "raw"),
        ("tcp", redis),
        ("tcp", "stripped"),
        ("tcp", "mooncake"),
        ("shm", "memcpy"),
        ("l4", "fio"),
    ]


def throughput_table(results: Results) -> str:
    """Return GB/s and ratios of every cell."""
    head = ("", "raw socket", "stripped loop", "to Redis", "tcp", "of raw", "Redis", "tcp to it",
            "Mooncake", "tcp to it", "memcpy", "with xxh3", "shm", "of memcpy")  # fmt: skip
    rows = []
    for cell, rounds in results.rounds.items():
        if not rounds.keys() - {"l4", "fio"}:
            continue
        redis = results.best(cell, REDIS)
        rows.append((
            _title(cell), *(_gb(results.speed(cell, name)) for name in ("raw", "stripped")),
            _number(results.ratio(cell, "stripped", redis)), _gb(results.speed(cell, "tcp")),
            _number(results.ratio(cell, "tcp", "raw")),
            _gb(results.speed(cell, redis)), _number(results.ratio(cell, "tcp", redis)),
            _gb(results.speed(cell, "mooncake")), _number(results.ratio(cell, "tcp", "mooncake")),
            *(_gb(results.speed(cell, name)) for name in ("memcpy", "memcpy_hash", "shm")),
            _number(results.ratio(cell, "shm", "memcpy")),
        ))  # fmt: skip
    return _markdown(head, rows)


def latency_table(results: Results) -> str:
    """Return p50 / p99 of single operations of one thread, in microseconds."""
    names = ("raw", "tcp", "redis", "mooncake", "memcpy", "shm", "shm_view", "pool_view")
    rows = [
        (_title(cell), *(_latency(results, cell, name) for name in names))
        for cell, rounds in results.rounds.items()
        if cell.batch == 1 and cell.threads == 1 and rounds.keys() - {"l4", "fio"}
    ]
    head = ("", "raw socket", "tcp", "Redis", "Mooncake", "memcpy", "shm",
            "shm, no copy", "Pool.view")  # fmt: skip
    return _markdown(head, rows)


def disk_table(results: Results) -> str:
    """Return GB/s of the disk tier and of fio; empty if not measured."""
    rows = [
        (_title(cell), _gb(results.speed(cell, "fio")), _gb(results.speed(cell, "l4")),
         _number(results.ratio(cell, "l4", "fio")))
        for cell, rounds in results.rounds.items()
        if "fio" in rounds or "l4" in rounds
    ]  # fmt: skip
    return _markdown(("", "fio, O_DIRECT", "L4", "of fio"), rows) if rows else ""


def aims_table(results: Results) -> str:
    """Return each aim with its verdict."""
    return _markdown(("aim", "result"), [(aim.text, aim.verdict()) for aim in aims(results)])


def _title(cell: Cell) -> str:
    many = f" x {cell.batch}" if cell.batch > 1 else ""
    threads = f", {cell.threads} threads" if cell.threads > 1 else ""
    return f"{cell.op} {size_name(cell.size)}{many}{threads}"


def _latency(results: Results, cell: Cell, name: str) -> str:
    p50, p99 = (_us(results.latency(cell, name, which)) for which in ("p50_s", "p99_s"))
    return "" if p50 is None or p99 is None else f"{render_number(p50)} / {render_number(p99)}"


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6


def _gb(speed: float | None) -> str:
    return "" if speed is None else render_number(speed / 1e9)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
