"""Where an engine publishes its KV events, and where it repeats them: from settings, or by default.

vLLM and SGLang publish on port 5557 unless told otherwise and repeat nothing unless given a second
port, for which the next free one is taken here. Each data-parallel rank has the ports after those
of the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError

_EVENTS_PORT: Final = 5557
_ANY_HOST: Final = frozenset({"*", "0.0.0.0", "[::]", "::"})
OFF: Final = "off"
"""What a setting says to have no events, or no replay."""


@dataclass(frozen=True, slots=True)
class EventEndpoint:
    """Where one rank of an engine speaks.

    Attributes:
        rank: data-parallel rank.
        events: address of its PUB socket.
        replay: address of its ROUTER socket; empty: it repeats nothing.
    """

    rank: int
    events: str
    replay: str = ""


def event_endpoints(
    engine_url: str, *, events_url: str = "", replay_url: str = "", ranks: int = 1
) -> tuple[EventEndpoint, ...]:
    """Return where to listen, one place for each rank; none when events are off.

    Args:
        engine_url: of the engine's HTTP server; its host is that of the defaults, and of addresses
            that stand for all of a machine's, which may so be copied from the engine's own flags.
        events_url: ``engine.events_url``: ``tcp://host:port``, ``ipc://path``, ``off`` or empty.
        replay_url: ``engine.events_replay_url``, the same.
        ranks: how many data-parallel ranks the engine has.

    Raises:
        ConfigError: an address that can't be connected to.
    """
    if not 1 <= ranks <= limits.MAX_ENGINE_RANKS:
        raise ConfigError(f"an engine has 1 to {limits.MAX_ENGINE_RANKS} ranks, not {ranks}")
    if events_url == OFF:
        return ()
    host = urlsplit(engine_url).hostname or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    events = _address(events_url or f"tcp://{host}:{_EVENTS_PORT}", host, "engine.events_url")
    replay = ""
    if replay_url != OFF:
        default = f"tcp://{host}:{_EVENTS_PORT + ranks}"
        replay = _address(replay_url or default, host, "engine.events_replay_url")
    places = [
        EventEndpoint(rank, _of_rank(events, rank), _of_rank(replay, rank)) for rank in range(ranks)
    ]
    shared = {place.events for place in places} & {place.replay for place in places}
    if shared:
        raise ConfigError(
            f"engine.events_url and engine.events_replay_url both take {min(shared)}",
            hint="each rank needs two ports of its own: put the second range behind the first",
        )
    return tuple(places)


def _address(text: str, host: str, setting: str) -> str:
    """Check an address and put the engine's host for one that means all of a machine's."""
    if text.startswith("ipc://") and len(text) > len("ipc://"):
        return text
    where, _, port = text.removeprefix("tcp://").rpartition(":")
    if not text.startswith("tcp://") or not where or not port.isdecimal():
        raise ConfigError(
            f"{setting} is {text!r}, which is no address to connect to",
            hint="write tcp://host:port or ipc://path as the engine's --kv-events-config has it, "
            "or off",
        )
    if not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{setting} is {text!r}: ports end at 65535")
    return f"tcp://{host if where in _ANY_HOST else where}:{port}"


def _of_rank(address: str, rank: int) -> str:
    """Return a rank's own address: ports count up, which engines of several ranks need."""
    if rank == 0 or not address:
        return address
    if not address.startswith("tcp://"):
        raise ConfigError(f"{address} is one address, and the engine has several ranks")
    where, _, port = address.rpartition(":")
    if int(port) + rank >= 1 << 16:
        raise ConfigError(f"{address} leaves no port for rank {rank}: ports end at 65535")
    return f"{where}:{int(port) + rank}"
