"""Logs with consumer groups in Streams of Valkey or Redis (``front.shared_state``).

Implements WorkLog for several fronts. A queue is a stream with consumer groups; dead letters
are a second stream. Reading is XREADGROUP; operations with a check of the holder are scripts.
The server's clock measures idle times, hence fronts need no common clock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from tierkv.dbfront.queue.work_log import (
    RELEASED_IDLE_S,
    DeadLetter,
    GroupState,
    PendingEntry,
    QueueEntry,
    QueueLostError,
    QueueState,
    check_body,
    check_names,
    full_queue,
)
from tierkv.kvcore import limits
from tierkv.kvcore.clock import Clock
from tierkv.scheduler.shared_state.valkey import valkey_client

_TIMEOUT_S: Final = 5.0
_BLOCK_S: Final = 2.0
"""Longest wait in the server; shorter than the time after which a connection counts as lost."""

_PREFIX: Final = "{tierkv:queue}:"
"""The braces keep all queues in one slot of a Valkey cluster, as scripts need."""

_NAMES: Final = _PREFIX + "names"
_ID: Final = re.compile(r"\d{1,15}(-\d{1,15})?")
_IDLE_CONSUMER_MS: Final = 3_600_000
"""Idle time after which a consumer without entries is forgotten: names of dead workers."""

# Of each script: KEYS[1] is the stream. Of those with an owner: ARGV are group, consumer and entry.
_OWNED: Final = """
local function held()
  local found = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)
  if found.err then
    if string.find(found.err, 'NOGROUP') then return nil end
    error(found.err)
  end
  return found[1]
end
local entry = held()
local own = entry and entry[2] == ARGV[2]
"""
_TRIM: Final = """
local function less(a, b) return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]) end
local function place(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return {tonumber(ms), tonumber(seq)}
end
local function fields(list)
  local found = {}
  for i = 1, #list, 2 do found[list[i]] = list[i + 1] end
  return found
end
local function trim()
  if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
  local first = nil
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local group = fields(info)
    local at = place(group['last-delivered-id'])
    at[2] = at[2] + 1
    if group.pending > 0 then at = place(redis.call('XPENDING', KEYS[1], group.name)[2]) end
    if not first or less(at, first) then first = at end
  end
  if not first then return 0 end
  local id = string.format('%.0f-%.0f', first[1], first[2])
  return redis.call('XTRIM', KEYS[1], 'MINID', '=', id)
end
"""
_ADD: Final = (
    _TRIM
    + """
local most = tonumber(ARGV[2])
if redis.call('XLEN', KEYS[1]) >= most then trim() end
if redis.call('XLEN', KEYS[1]) >= most then return false end
redis.call('SADD', KEYS[2], ARGV[3])
return redis.call('XADD', KEYS[1], '*', 'body', ARGV[1])
"""
)
_TIDY: Final = (
    _TRIM
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = fields(info).name
  for _, each in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], group)) do
    local consumer = fields(each)
    if consumer.pending == 0 and consumer.idle > tonumber(ARGV[1]) then
      redis.call('XGROUP', 'DELCONSUMER', KEYS[1], group, consumer.name)
    end
  end
end
return trim()
"""
)
_ACK: Final = (
    _OWNED + "if not own then return 0 end\nreturn redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])"
)
_TOUCH: Final = (
    _OWNED
    + """
if own then redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'JUSTID') end
return entry and entry[2] or ''
"""
)
_RELEASE: Final = (
    _OWNED
    + """
if not own then return 0 end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'IDLE', ARGV[4],
  'RETRYCOUNT', entry[4] - 1, 'JUSTID')
return 1
"""
)
_BURY: Final = (
    _OWNED
    + """
if not own then return 0 end
local body = redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3])[1][2][2]
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[5], '*', 'group', ARGV[1], 'body', body,
  'deliveries', entry[4], 'reason', ARGV[4])
return 1
"""
)
_BODIES: Final = """
local function with_bodies(pending)
  for i, each in ipairs(pending) do
    each[5] = redis.call('XRANGE', KEYS[1], each[1], each[1])[1][2][2]
  end
  return pending
end
local function pending(...)
  local found = redis.pcall('XPENDING', KEYS[1], ARGV[1], ...)
  if found.err then
    if string.find(found.err, 'NOGROUP') then return {} end
    error(found.err)
  end
  return found
end
"""
_CLAIM: Final = (
    _BODIES
    + """
local found = pending('IDLE', ARGV[3], '-', '+', ARGV[4])
for _, each in ipairs(found) do
  redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, each[1])
  each[4] = each[4] + 1
end
return with_bodies(found)
"""
)
_PENDING: Final = _BODIES + "return with_bodies(pending('-', '+', ARGV[2]))"
_STATE: Final = """
local function fields(list)
  local found = {}
  for i = 1, #list, 2 do found[list[i]] = list[i + 1] end
  return found
end
local groups = {}
if redis.call('EXISTS', KEYS[1]) == 1 then
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local group = fields(info)
    local waiting = #redis.call('XRANGE', KEYS[1], '(' .. group['last-delivered-id'], '+')
    local consumers, idle = {}, -1
    local count = 0
    for _, each in ipairs(redis.call('XPENDING', KEYS[1], group.name, '-', '+', group.pending)) do
      if not consumers[each[2]] then consumers[each[2]], count = true, count + 1 end
      idle = math.max(idle, each[3])
    end
    groups[#groups + 1] = {group.name, waiting, group.pending, count, idle}
  end
end
return {redis.call('XLEN', KEYS[1]), redis.call('XLEN', KEYS[2]), groups}
"""


class ValkeyLog:
    """Implements WorkLog over one connection pool."""

    def __init__(self, url: str, clock: Clock) -> None:
        """Prepare as ``valkey_client``.

        Args:
            url: see ``valkey_client``.
            clock: ends the wait of ``read``.
        """
        self._valkey, self._errors = valkey_client(url, _TIMEOUT_S)
        self._clock = clock
        self._scripts = {
            text: self._valkey.register_script(text)
            for text in (_ADD, _TIDY, _ACK, _TOUCH, _RELEASE, _BURY, _CLAIM, _PENDING, _STATE)
        }

    async def add(self, queue: str, body: str) -> str:
        check_names(queue)
        words = [check_body(body), limits.MAX_QUEUE_ENTRIES, queue]
        added = await self._run(_ADD, [_log(queue), _NAMES], words)
        if added is None:
            raise full_queue(queue)
        return _text(added)

    async def read(
        self, queue: str, group: str, consumer: str, *, count: int = 1, block_s: float = 0.0
    ) -> list[QueueEntry]:
        check_names(queue, group, consumer)
        end_s = self._clock.now() + block_s
        while True:
            left_s = end_s - self._clock.now()
            found = await self._read(queue, group, consumer, count, min(left_s, _BLOCK_S))
            if found or self._clock.now() >= end_s:
                return found

    async def _read(
        self, queue: str, group: str, consumer: str, count: int, block_s: float
    ) -> list[QueueEntry]:
        words: list[Any] = ["GROUP", group, consumer, "COUNT", count]
        if block_s > 0:
            words += ["BLOCK", max(1, math.ceil(1_000 * block_s))]
        words += ["STREAMS", _log(queue), ">"]
        try:
            reply = await self._ask("XREADGROUP", *words)
        except QueueLostError as error:
            if "NOGROUP" not in error.reason:
                raise
            await self._make_group(queue, group)
            reply = await self._ask("XREADGROUP", *words)
        streams = reply.items() if isinstance(reply, dict) else reply or ()
        return [
            QueueEntry(_text(number), _text(_fields(fields)["body"]))
            for _, entries in streams
            for number, fields in entries
        ]

    async def _make_group(self, queue: str, group: str) -> None:
        await self._ask("SADD", _NAMES, queue)
        try:
            await self._ask("XGROUP", "CREATE", _log(queue), group, "0", "MKSTREAM")
        except QueueLostError as error:
            if "BUSYGROUP" not in error.reason:  # Another front was faster.
                raise

    async def ack(self, queue: str, group: str, consumer: str, entry: str) -> bool:
        return bool(await self._run(_ACK, [_log(queue)], [group, consumer, _id(entry)]))

    async def touch(self, queue: str, group: str, consumer: str, entry: str) -> str:
        return _text(await self._run(_TOUCH, [_log(queue)], [group, consumer, _id(entry)]))

    async def claim(
        self, queue: str, group: str, consumer: str, *, min_idle_s: float, count: int = 1
    ) -> list[QueueEntry]:
        check_names(queue, group, consumer)
        words = [group, consumer, math.ceil(1_000 * min_idle_s), count]
        rows = await self._run(_CLAIM, [_log(queue)], words)
        return [QueueEntry(_text(row[0]), _text(row[4]), int(row[3])) for row in rows]

    async def release(self, queue: str, group: str, consumer: str, entry: str) -> bool:
        words = [group, consumer, _id(entry), int(1_000 * RELEASED_IDLE_S)]
        return bool(await self._run(_RELEASE, [_log(queue)], words))

    async def bury(self, queue: str, group: str, consumer: str, entry: str, *, reason: str) -> bool:
        words = [group, consumer, _id(entry), reason, limits.MAX_DEAD_LETTERS]
        return bool(await self._run(_BURY, [_log(queue), _dead(queue)], words))

    async def trim(self, queue: str) -> int:
        return int(await self._run(_TIDY, [_log(queue)], [_IDLE_CONSUMER_MS]))

    async def pending(self, queue: str, group: str, *, count: int) -> list[PendingEntry]:
        rows = await self._run(_PENDING, [_log(queue)], [group, count])
        return [
            PendingEntry(_text(number), _text(body), int(times), _text(consumer), idle_ms / 1_000)
            for number, consumer, idle_ms, times, body in rows
        ]

    async def dead(self, queue: str, *, count: int) -> list[DeadLetter]:
        rows = await self._ask("XRANGE", _dead(queue), "-", "+", "COUNT", count)
        found = []
        for number, pairs in rows:
            fields = {name: _text(value) for name, value in _fields(pairs).items()}
            at_s = int(_text(number).partition("-")[0]) / 1_000
            words = (_text(number), fields["group"], fields["body"], int(fields["deliveries"]))
            found.append(DeadLetter(*words, fields["reason"], at_s))
        return found

    async def forget_dead(self, queue: str, letters: Sequence[str]) -> int:
        return int(await self._ask("XDEL", _dead(queue), *map(_id, letters))) if letters else 0

    async def queues(self) -> list[QueueState]:
        found = []
        for name in sorted(map(_text, await self._ask("SMEMBERS", _NAMES))):
            length, dead, groups = await self._run(_STATE, [_log(name), _dead(name)], [])
            states = [
                GroupState(
                    _text(group), waiting, pending, held_by, None if idle < 0 else idle / 1_000
                )
                for group, waiting, pending, held_by, idle in groups
            ]
            states.sort(key=lambda state: state.name)
            found.append(QueueState(name, length, dead, tuple(states)))
        return found

    async def close(self) -> None:
        with suppress(*self._errors):
            await self._valkey.aclose()

    async def _ask(self, *words: Any) -> Any:
        try:
            return await self._valkey.execute_command(*words)
        except self._errors as error:
            raise _lost(error) from None

    async def _run(self, script: str, keys: Sequence[str], words: Sequence[Any]) -> Any:
        try:
            return await self._scripts[script](keys=keys, args=words)
        except self._errors as error:
            raise _lost(error) from None


def _lost(error: Exception) -> QueueLostError:
    return QueueLostError(f"the queue in front.shared_state: {type(error).__name__}: {error}")


def _log(queue: str) -> str:
    return f"{_PREFIX}log:{queue}"


def _dead(queue: str) -> str:
    return f"{_PREFIX}dead:{queue}"


def _id(entry: str) -> str:
    """Return an id readable for the server; 0-0, never an entry, for the id of another log."""
    return entry if _ID.fullmatch(entry) else "0-0"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _fields(pairs: Any) -> dict[str, bytes]:
    """Return the fields of an entry, which the client gives as a list or as a mapping."""
    items = pairs.items() if isinstance(pairs, dict) else zip(pairs[::2], pairs[1::2], strict=True)
    return {_text(name): value for name, value in items}
