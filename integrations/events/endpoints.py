"""Addresses on which an engine publishes and repeats KV events: from settings, or defaults.

By default vLLM and SGLang publish on port 5557. A replay of events needs a second port; the default
here is the first port after the ports for events. Each data-parallel rank uses the ports after the
previous rank's.
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
"""Value of a setting that turns events or replay off."""


@dataclass(frozen=True, slots=True)
class EventEndpoint:
    """Addresses of the event sockets of one rank.

    Attributes:
        rank: data-parallel rank.
        events: address of the engine's PUB socket.
        replay: address of the engine's ROUTER socket; empty: no replay.
    """

    rank: int
    events: str
    replay: str = ""


def event_endpoints(
    engine_url: str, *, events_url: str = "", replay_url: str = "", ranks: int = 1
) -> tuple[EventEndpoint, ...]:
    """Return the addresses of each rank; empty if events are off.

    Args:
        engine_url: URL of the engine's HTTP server. The host in the URL is the default host and
            replaces a wildcard host, so addresses may be copied from the engine's own flags.
        events_url: ``engine.events_url``: ``tcp://host:port``, ``ipc://path``, ``off`` or empty.
        replay_url: ``engine.events_replay_url``, in the same forms.
        ranks: number of data-parallel ranks of the engine.

    Raises:
        ConfigError: an address is unusable, or the ranks or ports do not fit.
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
            f"engine.events_url and engine.events_replay_url both use {min(shared)}",
            hint="each rank needs its own port in both: begin the second range after the first",
        )
    return tuple(places)


def _address(text: str, host: str, setting: str) -> str:
    """Check an address, and replace a wildcard host with the engine's host."""
    if text.startswith("ipc://") and len(text) > len("ipc://"):
        return text
    where, _, port = text.removeprefix("tcp://").rpartition(":")
    if not text.startswith("tcp://") or not where or not port.isdecimal():
        raise ConfigError(
            f"{setting} is {text!r}, which is not an address",
            hint="write tcp://host:port or ipc://path, as in the engine's --kv-events-config, or "
            "off",
        )
    if not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{setting} is {text!r}: the port must be 1 to 65535")
    return f"tcp://{host if where in _ANY_HOST else where}:{port}"


def _of_rank(address: str, rank: int) -> str:
    """Return the address of a rank: ports count up from rank 0, which needs a TCP address."""
    if rank == 0 or not address:
        return address
    if not address.startswith("tcp://"):
        raise ConfigError(f"{address} is one address, but the engine has several ranks")
    where, _, port = address.rpartition(":")
    if int(port) + rank >= 1 << 16:
        raise ConfigError(f"{address} leaves no port for rank {rank}: ports end at 65535")
    return f"{where}:{int(port) + rank}"
