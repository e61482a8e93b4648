"""One table of ratios to peers and to floors: ``python -m bench --peers``.

Runs the benchmarks that have a peer or a floor beside them, each in a process of its own, and
collects the ratios. A peer is another program that does the same (Redis, pgbouncer); a
floor is the least that the machine allows (a raw socket, memcpy, the SQL engine alone). Every ratio
is measured in one run, in turn with the other. What a benchmark leaves out, and which peers are
missing on this machine, it says on standard error. ``--into docs/performance.md`` puts the table
between the marks of that file, with the ratios that stood there before beside the new ones.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.report import Report, finish, make_parser, render_number

RUNS: Final = (
    ("start_time",), ("front_overhead",), ("sql", "--relay"), ("compute", "--parts", "decode"),
    ("relay_peers",), ("block_layers",), ("pool",), ("meta",),
)  # fmt: skip
"""Modules of this package, with their options."""

_ROOT: Final = Path(__file__).parent.parent
_PEERS: Final = ("redis", "redis_pipe", "redis_mget", "mooncake", "pgbouncer", "transformers")
_FLOORS: Final = ("raw", "memcpy", "fio", "direct", "encode", "duckdb", "torch", "rpc")
_LONGEST_FIRST: Final = sorted((*_PEERS, *_FLOORS), key=len, reverse=True)
_RATIO: Final = re.compile(
    rf"(?P<what>.+?)_(?:of|times_faster_than)_(?P<other>{'|'.join(_LONGEST_FIRST)})"
    r"(?P<where>_.+)?"
)


_HEAD: Final = "| bench | figure | of | before | ratio |"
_BEGIN: Final = "<!-- peers:begin -->"
_END: Final = "<!-- peers:end -->"


@dataclass(frozen=True, slots=True)
class Compared:
    """One ratio: what was measured, and the peer or the floor it is a multiple of."""

    bench: str
    what: str
    other: str
    ratio: float

    @property
    def is_peer(self) -> bool:
        """True for another program, False for a floor of the machine."""
        return self.other in _PEERS


def compared(bench: str, metrics: Mapping[str, float]) -> Iterator[Compared]:
    """Yield the ratios among a benchmark's metrics."""
    for name, value in metrics.items():
        found = _RATIO.fullmatch(name)
        if found is not None:
            what = found["what"] + (found["where"] or "")
            yield Compared(bench, what, found["other"], value)


def table(rows: Sequence[Compared], before: Mapping[str, str]) -> str:
    """Return a Markdown table; peers first, then floors.

    Args:
        rows: the ratios.
        before: earlier ratios by the beginning of their line (``ratios_in``).
    """
    lines = [_HEAD, "|---|---|---|--:|--:|"]
    for row in sorted(rows, key=lambda row: not row.is_peer):
        kind = "" if row.is_peer else " (floor)"
        begin = f"| `bench.{row.bench}` | {row.what} | {row.other}{kind} |"
        lines.append(f"{begin} {before.get(begin, '')} | {render_number(row.ratio)} |")
    return "\n".join(lines)


def ratios_in(text: str) -> dict[str, str]:
    """Return the ratios of a table in Markdown, by the beginning of each line."""
    found = {}
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) == len(_HEAD.split("|")) and line != _HEAD:
            found["|".join(cells[:4]) + "|"] = cells[5].strip()
    return found


def put_into(text: str, rows: Sequence[Compared]) -> str:
    """Return a page with the table between its marks, the ratios of the page beside the new ones.

    Lines of benchmarks without a row stay as they are.

    Raises:
        ValueError: the page has no marks.
    """
    before, begin, rest = text.partition(_BEGIN)
    old, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the page has no marks {_BEGIN} and {_END}")
    run = {f"| `bench.{row.bench}` " for row in rows}
    kept = [
        line
        for line in old.splitlines()
        if line.startswith("| `bench.") and not line.startswith(tuple(run))
    ]
    return "\n".join([before + _BEGIN, table(rows, ratios_in(old)), *kept, _END + after])


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--peers", action="store_true", help="this table")
    parser.add_argument("--into", type=Path, help="page that takes the table between its marks")
    parser.add_argument("--only", nargs="*", help="modules to run, all by default")
    arguments = parser.parse_args(argv)
    rows: list[Compared] = []
    failed: list[str] = []
    for module, *options in RUNS:
        if arguments.only and module not in arguments.only:
            continue
        command = [sys.executable, "-m", f"bench.{module}", *options, "--format", "json"]
        command += ["--seed", str(arguments.seed), *(["--quick"] if arguments.quick else [])]
        print(f"{module} ...", file=sys.stderr, flush=True)
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            cwd=Path(__file__).parent.parent,
        )
        if done.returncode:
            failed.append(module)
            continue
        metrics = json.loads(done.stdout)
        metrics.pop("machine")
        rows += compared(module, metrics)
    report = Report("peers")
    for row in rows:
        report.metrics[f"{row.bench} {row.what} of {row.other}"] = row.ratio
    for module in failed:
        report.note(f"bench.{module} failed: its figures are missing, so its aims are missed")
    if arguments.format == "json":
        finish(report, "json")
        return
    if arguments.into is not None:
        page = arguments.into.read_text(encoding="utf-8")
        arguments.into.write_text(put_into(page, rows), encoding="utf-8")
    print(table(rows, {}), *report.notes, sep="\n")


if __name__ == "__main__":
    main()
