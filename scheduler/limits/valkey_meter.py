"""A meter in Valkey or Redis, shared by several fronts (``front.shared_state``).

The value of a bucket's key is the moment of the full bucket, in seconds of the server's clock; the
key expires then. One script takes from all buckets of a call. It computes what
scheduler/limits/buckets.py computes; tests/contract/test_limit_meter.py runs both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from tierkv.scheduler.limits.buckets import Charge, Taken
from tierkv.scheduler.limits.place_leases import PlaceLeases
from tierkv.scheduler.shared_state.contract import SharedStateLostError
from tierkv.scheduler.shared_state.valkey import valkey_client

_log = logging.getLogger(__name__)
_PREFIX: Final = "{tierkv:limits}:"
"""The braces keep all buckets in one slot of a Valkey cluster, as a script needs."""

_NOW: Final = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
"""
_TAKE: Final = (
    _NOW
    + """
local full, most, refused = {}, 0, -1
for i, key in ipairs(KEYS) do
  local amount, per_s, burst = tonumber(ARGV[3*i-1]), tonumber(ARGV[3*i]), tonumber(ARGV[3*i+1])
  local from = math.max(tonumber(redis.call('GET', key) or 0), now)
  local wait = math.max(0, from + (math.min(amount, burst) - burst) / per_s - now)
  full[i] = from + amount / per_s
  if wait > most then most, refused = wait, i - 1 end
end
if most > tonumber(ARGV[1]) then return {tostring(most), refused} end
for i, key in ipairs(KEYS) do
  local left = math.ceil((full[i] - now) * 1000)
  redis.call('SET', key, string.format('%.6f', full[i]), 'PX', math.max(1, left))
end
return {tostring(most), -1}
"""
)
_GIVE_BACK: Final = (
    _NOW
    + """
for i, key in ipairs(KEYS) do
  local full = redis.call('GET', key)
  if full then
    full = tonumber(full) - tonumber(ARGV[i])
    local left = math.ceil((full - now) * 1000)
    if left > 0 then redis.call('SET', key, string.format('%.6f', full), 'PX', left)
    else redis.call('DEL', key) end
  end
end
"""
)
_AHEAD: Final = (
    _NOW
    + """
local found = {}
for i, key in ipairs(KEYS) do
  found[i] = tostring(math.max(0, tonumber(redis.call('GET', key) or 0) - now))
end
return found
"""
)


class ValkeyMeter:
    """Implements LimitMeter over one connection pool.

    Attributes:
        places: calls in flight, counted over all fronts.
    """

    def __init__(self, url: str) -> None:
        """Prepare as ``valkey_client``."""
        valkey, self._errors = valkey_client(url)
        self._valkey = valkey
        self.places: PlaceLeases | None = PlaceLeases(valkey, self._errors)
        self._take = valkey.register_script(_TAKE)
        self._give_back = valkey.register_script(_GIVE_BACK)
        self._ahead = valkey.register_script(_AHEAD)

    async def take(self, charges: Sequence[Charge], patience_s: float) -> Taken:
        words: list[float] = [patience_s]
        for each in charges:
            words += [each.amount, each.per_s, each.burst]
        wait_s, refused = await self._run(self._take, charges, words)
        return Taken(float(wait_s), int(refused))

    async def give_back(self, charges: Sequence[Charge]) -> None:
        words = [each.amount / each.per_s for each in charges]
        try:
            await self._run(self._give_back, charges, words)
        except SharedStateLostError as error:
            _log.warning("unused tokens could not be given back: %s", error)

    async def left(self, charges: Sequence[Charge]) -> list[float]:
        ahead = await self._run(self._ahead, charges, [])
        return [
            each.burst - float(ahead_s) * each.per_s
            for each, ahead_s in zip(charges, ahead, strict=True)
        ]

    async def close(self) -> None:
        if self.places is not None:
            await self.places.close()
        with suppress(*self._errors):
            await self._valkey.aclose()

    async def _run(self, script: Any, charges: Sequence[Charge], words: Sequence[float]) -> Any:
        try:
            return await script(keys=[_PREFIX + each.bucket for each in charges], args=words)
        except self._errors as error:
            raise SharedStateLostError(f"{type(error).__name__}: {error}") from None
