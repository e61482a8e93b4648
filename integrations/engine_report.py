"""What an engine reports to the cluster: problems with the pool, and hits, bytes and paths.

A problem never stops an engine: the engine keeps serving and computes the KV that the cache could
not give. The log and ``tierkv.nodes`` therefore have to explain missing hits to people. Complaints
are logged once per code and counted every time; Complaints is thread-safe. Texts may come from
requests and peers and are cleaned and bounded. integrations/pool_door.py sends the report with each
heartbeat; ``tierkv.nodes``, ``tierkv.stat_kvcache_node`` and ``tierkv status`` show the report.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final

from tierkv.dmp.client.values import PoolStats
from tierkv.integrations.identity import EngineIdentity
from tierkv.kvcore import limits
from tierkv.kvcore.block import Tier
from tierkv.kvcore.node import NodeReport, PathReport, TierStats

_log = logging.getLogger("tierkv.engines")
_OTHER: Final = "other"
_MOST_CODE_CHARS: Final = 64


class Complaints:
    """Complaints by code.

    Attributes:
        _counts: number of complaints of each code.
        _texts: the last text of each complaint that is not settled.
        _said: codes that are in the log.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._texts: dict[str, str] = {}
        self._said: set[str] = set()

    def complain(self, code: str, message: str, *, hint: str = "") -> None:
        """Count a complaint. The first complaint of each code is logged as a warning.

        Args:
            code: kind of problem, in small letters and ``_``.
            message: the event, with the values that show the problem.
            hint: the cure.
        """
        code = _clean_code(code)
        text = _join(message, hint)
        with self._lock:
            if code not in self._counts and len(self._counts) >= limits.MAX_NOTES - 2:
                code = _OTHER
            self._counts[code] += 1
            self._texts[code] = text
            first = code not in self._said
            self._said.add(code)
        if first:
            _log.warning("tierkv: %s: %s", code, text)

    def hold(self, code: str, message: str, *, hint: str = "") -> None:
        """Complain of a lasting problem, which is counted only once until it is settled."""
        with self._lock:
            held = _clean_code(code) in self._texts
            if held:
                self._texts[_clean_code(code)] = _join(message, hint)
        if not held:
            self.complain(code, message, hint=hint)

    def settle(self, code: str) -> None:
        """Mark a complaint as over; its count stays."""
        code = _clean_code(code)
        with self._lock:
            was = self._texts.pop(code, None)
        if was is not None:
            _log.info("tierkv: %s is over", code)

    def counts(self) -> tuple[tuple[str, int], ...]:
        """Return the number of complaints of each code."""
        with self._lock:
            return tuple(sorted(self._counts.items()))

    def notes(self) -> tuple[str, ...]:
        """Return unsettled complaints as text: code, count and the last message."""
        with self._lock:
            return tuple(
                f"{code} ({self._counts[code]}): {text}"[: limits.MAX_REASON_CHARS]
                for code, text in sorted(self._texts.items())
            )


def clean_text(text: str) -> str:
    """Make any text fit for one line of a log or a view."""
    shown = (c if c.isprintable() else "?" for c in text[: limits.MAX_REASON_CHARS])
    return "".join(shown)


def _join(message: str, hint: str) -> str:
    """Return one text for a log line or a list of notes, without a full stop at the end."""
    return clean_text(f"{message}. {hint}".removesuffix(".") if hint else message)


def _clean_code(code: str) -> str:
    return re.sub(r"[^a-z0-9_]", "_", code.lower())[:_MOST_CODE_CHARS] or _OTHER


TIER_COUNTS: Final = ("query_tokens", "hit_tokens", "stored_tokens", "read_bytes", "write_bytes")
"""Counters of a door that are columns of a tier."""


def engine_report(
    identity: EngineIdentity,
    counts: Mapping[str, int],
    complaints: Complaints,
    pool: PoolStats | None,
) -> NodeReport:
    """Build the report of an engine.

    Args:
        identity: the engine's model.
        counts: the door's counters.
        complaints: the door's complaints.
        pool: the newest statistics of the pool; None before the pool first answered.
    """
    members = pool.members if pool is not None else ()
    near = any(member.path.transport == "shm" for member in members)
    tier = TierStats(
        tier=Tier.L2 if near else Tier.L3,
        medium="pool",
        model=identity.label,
        alloc_failures=pool.refused if pool is not None else 0,
        **{name: counts.get(name, 0) for name in TIER_COUNTS},
    )
    paths = tuple(
        PathReport(
            member.node_id,
            member.path.transport or "none",
            clean_text(member.path.reason),
            usable=member.up,
        )
        for member in members
    )
    engine = f"{identity.engine} {identity.version}, rank {identity.rank} of {identity.ranks}"
    return NodeReport(
        tiers=(tier,),
        cache_errors=complaints.counts(),
        transfer_bytes_in=counts.get("read_bytes", 0),
        transfer_bytes_out=counts.get("write_bytes", 0),
        transfer_errors=sum(count for member in members for _, count in member.errors),
        paths=paths,
        notes=(clean_text(engine), *complaints.notes()),
    )
