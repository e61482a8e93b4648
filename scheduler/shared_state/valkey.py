"""Shared state in Valkey or Redis, for several fronts (``front.shared_state``).

One hash has a field per front: the time by the server's clock, and the front's counts
as JSON. An exchange is one script: one round trip, without a clock of ours. Only one key is used,
so a Valkey cluster serves the script, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import NodeId
from tierkv.scheduler.shared_state.contract import (
    KEPT_S,
    FrontWork,
    SharedStateLostError,
    summed,
)

T = TypeVar("T")

TIMEOUT_S: Final = 0.5
"""For an answer; a late answer is worth no more than none."""

_TRIES: Final = 200
"""Tries of a change that other clients came before."""

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

_LEAVE: Final = "redis.call('HDEL', KEYS[1], ARGV[1])"

SERVER_NOW: Final = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
"""
"""Begin of a script: ``now`` is the time by the server's clock, in seconds."""


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


class ServerScripts:
    """One connection pool, and scripts that run at its server; shared by the users of a server."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        """Prepare as ``valkey_client``."""
        self._valkey, self._errors = valkey_client(url, timeout_s)
        self._scripts: dict[str, Any] = {}

    async def run(self, text: str, keys: Sequence[str], words: Sequence[Any]) -> Any:
        """Run a script; the server keeps its text.

        Raises:
            SharedStateLostError: the server does not answer, or refuses.
        """
        script = self._scripts.get(text)
        if script is None:
            script = self._scripts[text] = self._valkey.register_script(text)
        try:
            return await script(keys=keys, args=words)
        except self._errors as error:
            raise SharedStateLostError(f"{type(error).__name__}: {error}") from None

    async def close(self) -> None:
        """Close the connections."""
        with suppress(*self._errors):
            await self._valkey.aclose()


class ValkeyState:
    """Implements SharedState over one connection pool."""

    def __init__(self, url: str) -> None:
        """Prepare as ``valkey_client``."""
        self._server = ServerScripts(url)

    async def exchange_work(
        self, front: str, own: Mapping[NodeId, FrontWork]
    ) -> Mapping[NodeId, FrontWork]:
        told = json.dumps({n: [w.requests, w.waiting_tokens] for n, w in own.items()})
        words = [front, told, int(KEPT_S * 1_000)]
        others: Sequence[bytes] = await self._server.run(_EXCHANGE, [_KEY], words)
        return summed(map(_work_of, others))

    async def leave(self, front: str) -> None:
        with suppress(SharedStateLostError):
            await self._server.run(_LEAVE, [_KEY], [front])
        await self._server.close()


def _work_of(told: bytes) -> dict[NodeId, FrontWork]:
    """Read a front's counts; a front of another version that tells more is understood, too."""
    try:
        return {
            NodeId(str(node)): FrontWork(int(numbers[0]), int(numbers[1]))
            for node, numbers in json.loads(told).items()
        }
    except (ValueError, TypeError, AttributeError, IndexError):
        return {}


class ValkeyTransactions:
    """Changes of a server that lasts, by callers that may wait: not for the event loop.

    Attributes:
        place: host and database number, without the password.
    """

    def __init__(self, url: str, setting: str, *, timeout_s: float) -> None:
        """Prepare; the first use connects.

        Args:
            url: see ``valkey_client``.
            setting: name of the setting with the URL, for errors.
            timeout_s: for a connection, and for an answer.

        Raises:
            ConfigError: the client library is missing, or the URL is none.
        """
        told = urlsplit(url)
        self.place = f"{told.scheme}://{told.hostname or ''}{told.path}"
        try:
            import valkey  # optional
        except ImportError:
            raise ConfigError(
                f"{setting} names a server, but its client is not installed",
                hint="Run pip install 'tierkv[valkey]'.",
            ) from None
        try:
            self._valkey: Any = valkey.Valkey.from_url(
                url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s
            )
        except ValueError as error:
            raise ConfigError(
                f"{setting} is no URL of a Valkey or Redis server: {error}",
                hint="Write redis://HOST:PORT/DATABASE, rediss:// for TLS, or unix:///PATH.",
            ) from None
        self._refused = valkey.exceptions.ResponseError
        self._overtaken = valkey.exceptions.WatchError
        self._lost = (valkey.exceptions.ValkeyError, OSError)
        self._expires_fields: bool | None = None

    def run(self, work: Callable[[Any], T]) -> T:
        """Run ``work``, and once more if the connection was lost.

        Raises:
            SharedStateLostError: no answer, or a refusal.
        """
        try:
            try:
                return work(self._valkey)
            except self._lost as error:
                if isinstance(error, self._refused | self._overtaken):
                    raise
                return work(self._valkey)
        except self._lost as error:
            raise SharedStateLostError(f"{type(error).__name__}: {error}") from error

    def change(self, key: bytes, work: Callable[[Any], T]) -> T:
        """Run an optimistic transaction: ``work`` reads, calls ``multi`` and queues its writes.

        ``work`` runs again if another client changed the key meanwhile. To be called in ``run``.
        """
        for _ in range(_TRIES):
            with self._valkey.pipeline() as pipe:
                pipe.watch(key)
                result = work(pipe)
                try:
                    pipe.execute()
                except self._overtaken:
                    continue
                return result
        raise self._overtaken("other clients change the same key all the time")

    def expires_fields(self) -> bool:
        """Return whether the server has expiry of fields, as Valkey 9 and Redis 7.4 have."""
        if self._expires_fields is None:
            try:
                self._valkey.execute_command("HPEXPIRE", "tierkv:none", 1, "FIELDS", 1, "none")
                self._expires_fields = True
            except self._refused:  # No such command, or an account that may not call it.
                self._expires_fields = False
        return self._expires_fields

    def close(self) -> None:
        """Close the connections; a lost one is closed already."""
        with suppress(*self._lost):
            self._valkey.close()
