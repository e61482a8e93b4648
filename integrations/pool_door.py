"""The only way from an engine's process to the pool; never blocks and never raises.

Created by the classes that vLLM and SGLang load (integrations/vllm, integrations/sglang). Calls run
in threads. A call ends with a default when the pool is away, slow to come up, overloaded or wrong.
The reason is logged once, counted, and shown in ``tierkv.nodes``. A door opens in the process that
uses the door, also after a fork.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from tierkv.dmp.client.pool import Pool
from tierkv.integrations.engine_report import Complaints, engine_report
from tierkv.integrations.identity import EngineIdentity, untested
from tierkv.integrations.membership import EngineMembership, Manifest
from tierkv.integrations.pool_keeper import Call, PoolKeeper, WorkQueue
from tierkv.integrations.settings import PoolAccess
from tierkv.kvcore import limits
from tierkv.kvcore.block import namespace_key
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.ids import NamespaceKey, NodeId
from tierkv.kvcore.node import NodeReport

T = TypeVar("T")
ALONE_SECRET: Final = b"tierkv-pool-without-a-cluster"
"""Keys block names without a meta server and without a secret: any program that reaches the pool
may read everything in the pool anyway."""

CLOSE_S: Final = 5.0


class PoolDoor:
    """An engine's door to the pool; thread-safe.

    Attributes:
        settings: access to the pool.
        identity: identity of the engine's KV.
    """

    def __init__(
        self,
        settings: PoolAccess,
        identity: EngineIdentity,
        *,
        part: str = "",
        clock: Clock | None = None,
    ) -> None:
        """Create a door, which opens at ``start`` or first use, in the calling process.

        Args:
            settings: access to the pool.
            identity: the engine's model and layout.
            part: distinguishes the doors of one engine with several processes, in their cluster
                names: ``scheduler``, ``rank0``.
            clock: for tests.
        """
        self.settings = settings
        self.identity = identity
        self._part = part
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._life: _Life | None = None
        self._closed = False
        _doors.add(self)

    # The interface of engines

    def start(self) -> None:
        """Open in the background; returns at once."""
        self._living()

    def submit(
        self, work: Callable[[Pool], T], default: T, *, name: str, urgent: bool = False
    ) -> Future[T]:
        """Run a function on the pool in a thread.

        Args:
            work: receives the pool; must not keep it.
            default: the answer if the pool is not up, the queue is full, or ``work`` raises.
            name: kind of call, for the counters ``NAME_failed`` and ``NAME_overflow``.
            urgent: run before other queued calls; for calls that a step of the engine waits for.

        Returns:
            A future with a value, never with an exception; already done if the door is not up.
        """
        life = self._living()
        call: Call[T] = Call(lambda: life.do(work, default), default, name)
        if not self.up:
            call.refuse()
        elif not life.queue.put(call, urgent=urgent):
            life.count(f"{name}_overflow")
            self.complain(
                "overflow",
                f"{name}: {limits.MAX_ENGINE_WORK} calls to the pool are already waiting",
                hint="Raise threads, or find out why the pool is slow.",
            )
            call.refuse()
        return call.answer

    def complain(self, code: str, message: str, *, hint: str = "") -> None:
        """Report a problem: logged once per code, counted each time, shown in tierkv.nodes."""
        self._living().complaints.complain(code, message, hint=hint)

    def settle(self, code: str) -> None:
        """Mark a complaint as over; its count stays."""
        self._living().complaints.settle(code)

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter of this process.

        ``query_tokens``, ``hit_tokens``, ``stored_tokens``, ``read_bytes`` and ``write_bytes`` are
        shown in ``tierkv.stat_kvcache_node``, further counters only in ``counts``.
        """
        self._living().count(name, by)

    def counts(self) -> dict[str, int]:
        """Return all counters, with complaints as ``complaints_CODE``."""
        return self._living().counts()

    def notes(self) -> tuple[str, ...]:
        """Return unsettled complaints as text: code, count and the last message."""
        return self._living().complaints.notes()

    @property
    def up(self) -> bool:
        """True if calls go to the pool: keys are known and a node answers."""
        life = self._living()
        return not self._closed and life.keeper.up and life.base_key is not None

    @property
    def base_key(self) -> NamespaceKey | None:
        """The key of the engine's tenant, model and layout; None while unknown.

        Read the key for each request: it changes when the cluster gets another secret. A door
        without a key is not up.
        """
        return self._living().base_key

    @property
    def why_down(self) -> str:
        """The reason why the door is not up; empty if the door is up."""
        if self.up:
            return ""
        life = self._living()
        if self._closed:
            return "closed"
        return life.keeper.why_down if life.base_key is not None else "no key of blocks yet"

    @property
    def node_id(self) -> NodeId:
        """The name of this process in the cluster."""
        return self._living().node_id

    def close(self) -> None:
        """End queued calls with defaults, wait ``CLOSE_S`` for running ones, leave the cluster."""
        with self._lock:
            self._closed = True
            life = self._life
        if life is not None:
            life.close()

    # Inside

    def _living(self) -> _Life:
        if self._life is not None:
            return self._life
        with self._lock:
            if self._life is None:
                life = _Life(self.settings, self.identity, self._part, self._clock)
                if self._closed:
                    life.close()
                else:
                    life.start()
                self._life = life
            return self._life

    def _forked(self) -> None:
        """Start again in a forked child, which has the parent's objects but not the threads."""
        if self._life is not None:
            _left_behind.append(self._life)
        self._life = None
        self._lock = threading.Lock()


class _Life:
    """The threads and counters of a door in one process."""

    def __init__(
        self, settings: PoolAccess, identity: EngineIdentity, part: str, clock: Clock
    ) -> None:
        self.complaints = Complaints()
        self.node_id = _node_id(settings, identity, part)
        self.queue = WorkQueue(
            settings.threads, limit=limits.MAX_ENGINE_WORK, on_failure=self._failed
        )
        self.member: EngineMembership | None = None
        self._identity = identity
        self._settings = settings
        self._started = False
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._alone = None if settings.meta else _key_alone(settings, identity)
        self.keeper = PoolKeeper(
            settings, self._addresses, self.complaints, on_look=self._looked_at
        )
        self._manifest = Manifest(identity, self.node_id, self.complaints, clock)
        if settings.meta:
            self.member = EngineMembership(
                settings,
                identity,
                self.complaints,
                node_id=self.node_id,
                report=self._report,
                on_change=self.keeper.wake.set,
                clock=clock,
            )

    @property
    def base_key(self) -> NamespaceKey | None:
        if not self._identity.revision:
            return None
        return self._alone if self.member is None else self.member.base_key

    def start(self) -> None:
        if not self._identity.revision:
            self.complaints.hold(
                "model_revision",
                f"which weights {self._identity.model} are can't be told, so nothing is shared",
                hint="Give the engine a folder with safetensors, or the commit as its revision.",
            )
        said = untested(self._identity.engine, self._identity.version)
        if said:
            self.complaints.hold(
                "untested_version", said, hint="The engine may work; see docs/engines.md."
            )
        self._started = True
        self.keeper.start()
        if self.member is not None:
            self.member.start()

    def close(self) -> None:
        ended = self.queue.close(timeout_s=CLOSE_S)
        if not self._started:
            return
        if self.member is not None:
            self.member.stop()
        # A hanging call still uses the pool, so the pool stays open until the process ends.
        if ended:
            self.keeper.close(timeout_s=CLOSE_S)

    def do(self, work: Callable[[Pool], T], default: T) -> T:
        pool = self.keeper.pool
        if pool is None or not self.keeper.up or self.base_key is None:
            return default
        return work(pool)

    def count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by

    def counts(self) -> dict[str, int]:
        with self._lock:
            counts = dict(self._counts)
        return counts | {f"complaints_{code}": n for code, n in self.complaints.counts()}

    def _addresses(self) -> tuple[str, ...]:
        if self._settings.pool:
            return self._settings.pool
        return () if self.member is None else self.member.addresses

    def _looked_at(self, pool: Pool) -> None:
        if not self.keeper.up:
            self.queue.drop()  # None of the queued calls can succeed.
        elif self.base_key is not None:
            self._manifest.look(pool)

    def _failed(self, name: str, error: Exception) -> None:
        self.count(f"{name}_failed")
        self.complaints.complain(
            f"{name}_failed", f"{name}: {type(error).__name__}: {error}", hint="Counted as a miss."
        )

    def _report(self) -> NodeReport:
        with self._lock:
            counts = dict(self._counts)
        report = engine_report(self._identity, counts, self.complaints, self.keeper.stats)
        return self.keeper.traffic.told_in(report)


def _key_alone(settings: PoolAccess, identity: EngineIdentity) -> NamespaceKey:
    return namespace_key(
        settings.secret_bytes or ALONE_SECRET,
        tenant=settings.tenant,
        model_revision=identity.revision,
        layout_fingerprint=identity.fingerprint(),
    )


def _node_id(settings: PoolAccess, identity: EngineIdentity, part: str) -> NodeId:
    """Return the name of this process; the pid distinguishes engines on one host."""
    name = settings.node_id or f"{identity.engine}-{settings.host_id}-{os.getpid()}"
    ending = f"-{part}" if part else ""
    return NodeId(name[: limits.MAX_NAME_CHARS - len(ending)] + ending)


_doors: weakref.WeakSet[PoolDoor] = weakref.WeakSet()
_left_behind: list[_Life] = []
"""Objects of a parent process, kept by the child: finalising them would touch shared state (epoll).
"""


def _fork_all() -> None:
    for door in list(_doors):
        door._forked()


os.register_at_fork(after_in_child=_fork_all)
