"""A meter in Valkey or Redis, shared by several fronts (``front.shared_state``).

The value of a bucket's key is the moment of the full bucket, in seconds of the server's clock; the
key expires then. One script takes from all buckets of a call. It computes what
scheduler/limits/buckets.py computes; tests/contract/test_limit_meter.py runs both.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

from tierkv.scheduler.limits.buckets import Charge, Taken
from tierkv.scheduler.limits.place_leases import PlaceLeases
from tierkv.scheduler.shared_state.contract import SharedStateLostError
from tierkv.scheduler.shared_state.valkey import SERVER_NOW, ServerScripts

_log = logging.getLogger(__name__)
_PREFIX: Final = "{tierkv:limits}:"
"""The braces keep all buckets in one slot of a Valkey cluster, as a script needs."""

_TAKE: Final = (
    SERVER_NOW
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
    SERVER_NOW
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
    SERVER_NOW
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
        self._server = ServerScripts(url)
        self.places: PlaceLeases | None = PlaceLeases(self._server)

    async def take(self, charges: Sequence[Charge], patience_s: float) -> Taken:
        words: list[float] = [patience_s]
        for each in charges:
            words += [each.amount, each.per_s, each.burst]
        wait_s, refused = await self._run(_TAKE, charges, words)
        return Taken(float(wait_s), int(refused))

    async def give_back(self, charges: Sequence[Charge]) -> None:
        words = [each.amount / each.per_s for each in charges]
        try:
            await self._run(_GIVE_BACK, charges, words)
        except SharedStateLostError as error:
            _log.warning("unused tokens could not be given back: %s", error)

    async def left(self, charges: Sequence[Charge]) -> list[float]:
        ahead = await self._run(_AHEAD, charges, [])
        return [
            each.burst - float(ahead_s) * each.per_s
            for each, ahead_s in zip(charges, ahead, strict=True)
        ]

    async def close(self) -> None:
        if self.places is not None:
            await self.places.close()
        await self._server.close()

    async def _run(self, script: str, charges: Sequence[Charge], words: Sequence[float]) -> Any:
        return await self._server.run(script, [_PREFIX + each.bucket for each in charges], words)
