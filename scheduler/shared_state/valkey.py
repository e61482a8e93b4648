"""Shared state in Valkey or Redis, for several fronts (``front.shared_state``).

One hash has a field per front: the time by the server's clock, and the front's counts
as JSON. An exchange is one script, so it is one round trip and needs no clock of ours. Only one key
is used, so a Valkey cluster serves the script, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import NodeId
from tierkv.scheduler.shared_state.contract import (
    KEPT_S,
    FrontWork,
    SharedStateLostError,
    summed,
)

TIMEOUT_S: Final = 0.5
"""For an answer; a late answer is worth no more than none."""

_KEY: Final = "tierkv:work"
"""Clusters that share a server have a database number each: redis://host/1."""

_EXCHANGE: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], now .. ' ' .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
local told = redis.call('HGETALL', KEYS[1])
local others = {}
for i = 1, #told, 2 do
  if tonumber(string.match(told[i + 1], '^%d+')) <= now - ARGV[3] then
    redis.call('HDEL', KEYS[1], told[i])
  elseif told[i] ~= ARGV[1] then
    others[#others + 1] = string.match(told[i + 1], ' (.*)$')
  end
end
return others
"""
"""Arguments: the front, its work, and how long counts hold in milliseconds."""


def valkey_client(
    url: str, timeout_s: float = TIMEOUT_S
) -> tuple[Any, tuple[type[Exception], ...]]:
    """Return a client, which connects when first used, and what a lost server raises there.

    Args:
        url: ``redis://``, ``rediss://``, ``valkey://``, ``valkeys://`` or ``unix://``.
        timeout_s: for a connection, and for an answer.

    Raises:
        ConfigError: the client library is missing, or the URL is none.
    """
    try:
        from valkey.asyncio import Valkey  # optional
        from valkey.exceptions import ValkeyError
    except ImportError:
        raise ConfigError(
            "front.shared_state names a server, but its client is not installed",
            hint="Run pip install 'tierkv[valkey]', or leave front.shared_state empty.",
        ) from None
    try:
        client = Valkey.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
    except ValueError as error:
        raise ConfigError(
            f"front.shared_state is no URL of a Valkey or Redis server: {error}",
            hint="Write redis://HOST:PORT/DATABASE, rediss:// for TLS, or unix:///PATH.",
        ) from None
    return client, (ValkeyError, OSError, TimeoutError)


class ValkeyState:
    """Implements SharedState over one connection pool."""

    def __init__(self, url: str) -> None:
        """Prepare as ``valkey_client``."""
        self._valkey, self._errors = valkey_client(url)
        self._exchange = self._valkey.register_script(_EXCHANGE)

    async def exchange_work(
        self, front: str, own: Mapping[NodeId, FrontWork]
    ) -> Mapping[NodeId, FrontWork]:
        told = json.dumps({n: [w.requests, w.waiting_tokens] for n, w in own.items()})
        try:
            others: Sequence[bytes] = await self._exchange(
                keys=[_KEY], args=[front, told, int(KEPT_S * 1_000)]
            )
        except self._errors as error:
            raise SharedStateLostError(f"{type(error).__name__}: {error}") from None
        return summed(map(_work_of, others))

    async def leave(self, front: str) -> None:
        with suppress(*self._errors):
            await self._valkey.hdel(_KEY, front)
        await self._valkey.aclose()


def _work_of(told: bytes) -> dict[NodeId, FrontWork]:
    """Read a front's counts; a front of another version that tells more is understood, too."""
    try:
        return {
            NodeId(str(node)): FrontWork(int(numbers[0]), int(numbers[1]))
            for node, numbers in json.loads(told).items()
        }
    except (ValueError, TypeError, AttributeError, IndexError):
        return {}
