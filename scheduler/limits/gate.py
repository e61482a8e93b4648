"""The gate in front of the scheduler: admits AI calls within their callers' limits.

Used by dbfront/generation/generation.py for every call. Calls without a limit pass at the cost of
three lookups. A call of a SQL statement waits for its turn, because a statement has more calls than
a second allows; a REST call is refused, unless the limit is ``smooth``.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from tierkv.kvcore.call_limits import CallLimits, CallRate, Subject, SubjectKind, WhenLost
from tierkv.kvcore.errors import CallLimitError
from tierkv.scheduler.limits.buckets import Charge, LimitMeter, Taken
from tierkv.scheduler.limits.place_leases import (
    NONE_WAIT,
    CallsWaiting,
    CallTurns,
    PlaceLeases,
    PlacesHere,
    RunningCalls,
)
from tierkv.scheduler.shared_state.contract import SharedStateLostError

_log = logging.getLogger(__name__)
LONGEST_TURN_S: Final = 60.0
"""A statement's next call may wait so long for its turn; one that would wait longer is refused."""

LONGEST_SMOOTH_TURN_S: Final = 3_600.0
"""The same for a smooth limit: a day's budget that is spread evenly makes each call wait."""

SMOOTH_WAIT_S: Final = 10.0
"""A REST call of a smooth limit may wait so long; clients give up after some tens of seconds."""

_LOOK_S: Final = 0.1
"""A call that waits for the end of another front's call looks so often."""

_SOON_S: Final = 1.0
"""Retry time of a REST call while running calls may give tokens back."""

_METERED: Final = ("requests", "prompt_tokens", "completion_tokens")

_MONEY_S: Final = 3_600.0
"""Rates per hour or day guard budgets, shorter ones only smooth load."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever makes a call.

    Attributes:
        tenant: the SQL user, or the tenant of the REST key.
        key: name of the REST key; empty for SQL.
        waits: whether the call may wait for its turn although no limit is smooth.
        model: name of the model, which decides about the namespace.
    """

    tenant: str
    key: str = ""
    waits: bool = False
    model: str = ""


@dataclass(slots=True)
class AdmittedCall:
    """An admitted call; the caller notes what it really used.

    Attributes:
        completion_tokens: tokens generated so far.
        began: whether a node began to answer; otherwise all is given back.
    """

    completion_tokens: int = 0
    began: bool = False


@dataclass(frozen=True, slots=True)
class _Metered:
    """A charge, with the option behind the charge."""

    subject: Subject
    what: str
    allowed: str
    charge: Charge


@dataclass(frozen=True, slots=True)
class LimitLeft:
    """One limit and the rest left, for the views.

    Attributes:
        subject: whom it applies to.
        limit: the option's name, as in SQL.
        allowed: the option's value.
        left: requests, tokens or places; None while the buckets can't be reached.
        refused: calls refused for this limit by this process.
        waits: calls of this process that wait for limits of the subject.
    """

    subject: Subject
    limit: str
    allowed: str
    left: float | None
    refused: int = 0
    waits: CallsWaiting = NONE_WAIT


class CallGate:
    """Admits calls of one front process. Used from one event loop.

    Attributes:
        meter: the buckets; closed by the gate's owner.
        limits: by subject; see ``follow``.
        namespace_of: the namespace of each tenant that a namespace names, by tenant and model; with
            an empty model, for all models without a namespace of their own.
        refused: calls refused so far, by subject and limit.
    """

    def __init__(
        self, meter: LimitMeter, *, shares: int = 1, when_lost: WhenLost = WhenLost.AUTO
    ) -> None:
        """Begin without limits.

        Args:
            meter: the buckets.
            shares: processes that share each limit without sharing the meter.
            when_lost: what happens while the meter can't be reached.
        """
        self.limits: Mapping[Subject, CallLimits] = {}
        self.namespace_of: Mapping[tuple[str, str], str] = {}
        self.refused: dict[tuple[Subject, str], int] = {}
        self.meter = meter
        self._shares = shares
        self._when_lost = when_lost
        self._ends = 0
        self._running: dict[str, RunningCalls] = {}
        self._places: dict[Subject, PlacesHere] = {}
        self._turns = CallTurns()

    def follow(self, limits: Mapping[Subject, CallLimits]) -> None:
        """Obey other limits from now on; calls in flight go on, even above a lowered limit."""
        if limits == self.limits:
            return
        self.limits = limits
        for subject in list(self._places):
            self._fill(subject)

    def priority(self, caller: Caller, asked: int) -> int:
        """Return the priority of a call: as asked for, or less urgent if a limit says so."""
        if not self.limits:
            return asked
        allowed = [limit.max_priority for _, limit in self._of(caller)]
        return max([asked, *(most for most in allowed if most is not None)])

    def weight(self, tenant: str) -> float:
        """Return a tenant's share of turns: the tenant's own weight, or the namespace's, or 1."""
        if not self.limits:
            return 1.0
        weights = (limit.weight for _, limit in self._of(Caller(tenant)))
        return float(next(filter(None, weights), 1))

    @asynccontextmanager
    async def admitted(
        self, caller: Caller, *, prompt_tokens: int, most_tokens: int
    ) -> AsyncIterator[AdmittedCall]:
        """Wait until a call may be sent; on leaving, give the unused rest back.

        Args:
            caller: makes the call.
            prompt_tokens: tokens of its prompt.
            most_tokens: tokens that it may generate.

        Raises:
            CallLimitError: a limit is used up.
        """
        admission = AdmittedCall()
        found = self._of(caller) if self.limits else []
        if not found:
            yield admission
            return
        patience_s = _patience_s(caller, found)
        amounts = dict(zip(_METERED, (1, prompt_tokens, most_tokens), strict=True))
        metered = [each for each in self._metered(found, amounts) if each.charge.amount > 0]
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(None if caller.waits else patience_s or None):
                    taken = await self._admit(held, found, metered, patience_s)
            except TimeoutError:
                raise self._no_turn(found, patience_s) from None
            with self._reserving(metered if taken else []):
                try:
                    yield admission
                finally:
                    if taken:
                        await self._give_back(metered, admission, most_tokens)

    async def _admit(
        self,
        held: AsyncExitStack,
        found: list[tuple[Subject, CallLimits]],
        metered: list[_Metered],
        patience_s: float,
    ) -> bool:
        """Wait for places, until ``held`` is closed, and buckets; return as ``_take``."""
        with self._turns.counted(tuple(subject for subject, _ in found)):
            for subject, limit in found:
                if limit.max_in_flight:
                    await self._enter(subject, limit.max_in_flight, patience_s)
                    held.callback(self._leave, subject)
                    if (leases := self.meter.places) is not None:
                        lease = await self._lease(leases, subject, patience_s)
                        held.callback(leases.give_back, lease)
            return await self._take(found, metered, patience_s)

    def _of(self, caller: Caller) -> list[tuple[Subject, CallLimits]]:
        """Return the limits that a caller has."""
        known, tenant = self.namespace_of, caller.tenant
        namespace = known.get((tenant, caller.model)) or known.get((tenant, ""), tenant)
        subjects = (
            Subject(SubjectKind.TENANT, caller.tenant),
            Subject(SubjectKind.NAMESPACE, namespace),
            Subject(SubjectKind.KEY, caller.key),
        )
        return [(each, self.limits[each]) for each in subjects if each in self.limits]

    def _of_all_models(self, caller: Caller) -> list[tuple[Subject, CallLimits]]:
        models = {model for tenant, model in self.namespace_of if tenant == caller.tenant} | {""}
        callers = (replace(caller, model=model) for model in sorted(models))
        return list(dict(pair for each in callers for pair in self._of(each)).items())

    # -- buckets

    def _metered(
        self, found: list[tuple[Subject, CallLimits]], amounts: Mapping[str, float]
    ) -> Iterator[_Metered]:
        for (subject, limit), (what, amount) in product(found, amounts.items()):
            rate: CallRate | None = getattr(limit, what)
            if rate is None:
                continue
            burst, per_s = rate.amount, rate.per_s
            if what == "requests" and limit.burst:
                burst = limit.burst
            if limit.smooth:
                burst = 1.0 if what == "requests" else per_s
            charge = Charge(
                # With its rate: whoever gets another rate gets a full bucket.
                f"{subject.kind}:{subject.name}:{what}:{rate}",
                amount,
                per_s / self._shares,
                max(burst / self._shares, 1.0),
            )
            yield _Metered(subject, what, str(rate), charge)

    async def _take(
        self,
        found: list[tuple[Subject, CallLimits]],
        metered: list[_Metered],
        patience_s: float,
    ) -> bool:
        """Take all charges and wait for the turn; return False if the buckets can't be reached."""
        if not metered:
            return False
        charges = [each.charge for each in metered]
        subjects = tuple(subject for subject, _ in found)
        async with self._turns.turn(subjects) if patience_s else nullcontext():
            try:
                taken = await self._take_or_wait(metered, charges, patience_s)
            except SharedStateLostError as error:
                self._without_buckets(found, error)
                return False
            if taken.wait_s:
                try:
                    await self._turns.pause(subjects, taken.wait_s)
                except asyncio.CancelledError:
                    await self.meter.give_back(charges)
                    raise
        return True

    async def _take_or_wait(
        self, metered: list[_Metered], charges: list[Charge], patience_s: float
    ) -> Taken:
        """Take all charges. Running calls will give most of their completion tokens back, so a
        patient call waits for the end of a running call before the call is refused.
        """
        while True:
            ends = self._ends
            taken = await self.meter.take(charges, patience_s)
            if taken.refused < 0:
                return taken
            by = metered[taken.refused]
            running = self._running.get(by.charge.bucket)
            if running is None and ends != self._ends:
                continue  # A call ended during the question.
            if running is None:
                raise self._refusal(by.subject, by.what, by.allowed, taken.wait_s)
            if not patience_s:
                soon_s = min(taken.wait_s, _SOON_S)
                raise self._refusal(by.subject, by.what, by.allowed, soon_s)
            await running.ended.wait()

    @contextmanager
    def _reserving(self, metered: list[_Metered]) -> Iterator[None]:
        """Count a running call with completion tokens to give back."""
        buckets = [each.charge.bucket for each in metered if each.what == "completion_tokens"]
        for bucket in buckets:
            self._running.setdefault(bucket, RunningCalls()).calls += 1
        try:
            yield
        finally:
            self._ends += 1
            for bucket in buckets:
                running = self._running[bucket]
                running.calls -= 1
                running.ended.set()
                if running.calls:
                    running.ended = asyncio.Event()
                else:
                    del self._running[bucket]

    async def _give_back(
        self, metered: list[_Metered], admission: AdmittedCall, most_tokens: int
    ) -> None:
        unused = max(0, most_tokens - admission.completion_tokens)
        back = []
        for each in metered:
            if not admission.began:
                back.append(each.charge)
            elif each.what == "completion_tokens" and unused:
                back.append(replace(each.charge, amount=unused))
        if back:
            await self.meter.give_back(back)

    def _without_buckets(
        self, found: list[tuple[Subject, CallLimits]], error: SharedStateLostError
    ) -> None:
        """Admit or refuse a call without a look at the call's buckets."""
        rates = [
            rate
            for _, limit in found
            for rate in (limit.requests, limit.prompt_tokens, limit.completion_tokens)
            if rate is not None
        ]
        guards = any(rate.period_s >= _MONEY_S for rate in rates)
        if self._when_lost is WhenLost.ADMIT or (self._when_lost is WhenLost.AUTO and not guards):
            _log.warning("a call passes without a look at its limits: %s", error)
            return
        raise CallLimitError(
            f"the limits of {found[0][0]} can't be looked up: {error}",
            hint="An operator looks at the server of front.shared_state; front.limits_when_lost "
            "says what happens without it.",
        )

    # -- places

    async def _enter(self, subject: Subject, most: int, patience_s: float) -> None:
        places = self._places.setdefault(subject, PlacesHere())
        if places.taken < self._share(most) and not places.waiting:
            places.taken += 1
            return
        if not patience_s:
            raise self._refusal(subject, "max_in_flight", str(most), 1.0)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        places.waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave(subject)  # The place came together with the cancel.
            else:
                with suppress(ValueError):  # ``_leave`` may have dropped it already.
                    places.waiting.remove(place)
            raise

    async def _lease(self, leases: PlaceLeases, subject: Subject, patience_s: float) -> str:
        """Wait for a place among the calls of all fronts; return its lease, empty without one.

        Of the waiting calls of this front only the first asks.
        """
        async with self._places[subject].first if patience_s else nullcontext():
            while True:
                most = self.limits.get(subject, CallLimits()).max_in_flight
                if not most:
                    return ""  # The limit was removed meanwhile.
                try:
                    lease = await leases.take(str(subject), most)
                except SharedStateLostError as error:
                    self._without_buckets([(subject, CallLimits())], error)
                    return ""
                if lease:
                    return lease
                if not patience_s:
                    raise self._refusal(subject, "max_in_flight", str(most), 1.0)
                await asyncio.sleep(_LOOK_S)

    def _share(self, most: int) -> int:
        """Return this process's share of the places; 0: no limit."""
        return max(1, most // self._shares) if most else 0

    def _leave(self, subject: Subject) -> None:
        """Free a place, or pass the place on; places above a lowered limit are not passed on."""
        self._places[subject].taken -= 1
        self._fill(subject)

    def _fill(self, subject: Subject) -> None:
        places = self._places[subject]
        limit = self.limits.get(subject)
        most = self._share(limit.max_in_flight) if limit is not None else 0
        if not places.fill(most):
            del self._places[subject]

    # -- what others read

    def _no_turn(
        self, found: list[tuple[Subject, CallLimits]], patience_s: float
    ) -> CallLimitError:
        """Return the error of a REST call that waited in vain."""
        subject = next(subject for subject, limit in found if limit.smooth)
        self.refused[subject, "smooth"] = self.refused.get((subject, "smooth"), 0) + 1
        return CallLimitError(
            f"the limits of {subject} left this call no turn within {patience_s:g} s",
            hint="Send fewer calls at a time; view tierkv.my_limits shows what is left.",
        )

    def _refusal(self, subject: Subject, what: str, allowed: str, wait_s: float) -> CallLimitError:
        self.refused[subject, what] = self.refused.get((subject, what), 0) + 1
        return CallLimitError(
            f"{subject} has used its limit of {what}: {allowed}",
            hint=f"Try again after {_text(wait_s)}; view tierkv.my_limits shows what is left.",
            retry_after_ms=math.ceil(wait_s * 1_000),
        )

    async def left(self, caller: Caller | None = None) -> list[LimitLeft]:
        """Return the rest of a caller's limits, or of all limits."""
        found = list(self.limits.items()) if caller is None else self._of_all_models(caller)
        metered = list(self._metered(found, dict.fromkeys(_METERED, 0.0)))
        try:
            told: list[float | None] = [*await self.meter.left([m.charge for m in metered])]
        except SharedStateLostError:
            told = [None] * len(metered)
        in_flight = await self._in_flight([s for s, limit in found if limit.max_in_flight])
        rows = [
            LimitLeft(each.subject, each.what, each.allowed, rest)
            for each, rest in zip(metered, told, strict=True)
        ]
        for subject, limit in found:
            most = self._share(limit.max_in_flight)
            if most:
                taken = in_flight.get(subject)
                left = None if taken is None else most - taken
                rows.append(LimitLeft(subject, "max_in_flight", str(most), left))
            if limit.max_priority is not None:
                rows.append(LimitLeft(subject, "max_priority", str(limit.max_priority), None))
            if limit.weight:
                rows.append(LimitLeft(subject, "weight", str(limit.weight), None))
        return [
            replace(
                row,
                refused=self.refused.get((row.subject, row.limit), 0),
                waits=self._turns.waiting(row.subject),
            )
            for row in rows
        ]

    async def _in_flight(self, subjects: list[Subject]) -> dict[Subject, int]:
        """Return the calls in flight: of all fronts, or of this process if it counts alone."""
        if self.meter.places is None:
            return {s: self._places[s].taken if s in self._places else 0 for s in subjects}
        with suppress(SharedStateLostError):
            taken = await self.meter.places.taken([str(subject) for subject in subjects])
            return dict(zip(subjects, taken, strict=True))
        return {}


def _patience_s(caller: Caller, found: list[tuple[Subject, CallLimits]]) -> float:
    smooth = any(limit.smooth for _, limit in found)
    if caller.waits:
        return LONGEST_SMOOTH_TURN_S if smooth else LONGEST_TURN_S
    return SMOOTH_WAIT_S if smooth else 0.0


def _text(seconds: float) -> str:
    if seconds < 120.0:
        return f"{max(1, math.ceil(seconds))} s"
    minutes = math.ceil(seconds / 60.0)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
