"""Where engines are listened to."""

from __future__ import annotations

import pytest

from tierkv.integrations.events.listener import EventEndpoint, event_endpoints
from tierkv.kvcore.errors import ConfigError


def test_the_defaults_are_on_the_engines_host() -> None:
    assert event_endpoints("http://gpu7:8000/v1") == (
        EventEndpoint(0, "tcp://gpu7:5557", "tcp://gpu7:5558"),
    )
    (v6,) = event_endpoints("http://[fd00::7]:8000")
    assert v6 == EventEndpoint(0, "tcp://[fd00::7]:5557", "tcp://[fd00::7]:5558")


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]"])
def test_the_engines_own_address_may_be_copied(host: str) -> None:
    (place,) = event_endpoints(
        "http://gpu7:8000", events_url=f"tcp://{host}:6001", replay_url=f"tcp://{host}:6002"
    )
    assert place == EventEndpoint(0, "tcp://gpu7:6001", "tcp://gpu7:6002")


def test_addresses_of_others_stay_and_ranks_count_ports_up() -> None:
    places = event_endpoints(
        "http://gpu7:8000", events_url="tcp://gpu8:6001", replay_url="off", ranks=2
    )
    assert places == (EventEndpoint(0, "tcp://gpu8:6001"), EventEndpoint(1, "tcp://gpu8:6002"))


def test_a_path_and_nothing_at_all() -> None:
    (place,) = event_endpoints("http://x", events_url="ipc:///run/e", replay_url="ipc:///run/r")
    assert place == EventEndpoint(0, "ipc:///run/e", "ipc:///run/r")
    assert event_endpoints("http://x", events_url="off") == ()


@pytest.mark.parametrize(
    "url", ["gpu7:5557", "http://gpu7:5557", "tcp://gpu7", "tcp://:1", "tcp://a:b", "ipc://"]
)
def test_what_is_no_address_is_refused_with_the_cure(url: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.events_url") as refused:
        event_endpoints("http://x", events_url=url)
    assert "--kv-events-config" in refused.value.hint


def test_ports_and_ranks_have_bounds() -> None:
    with pytest.raises(ConfigError, match="65535"):
        event_endpoints("http://x", events_url="tcp://x:65536")
    with pytest.raises(ConfigError, match="rank 1: ports end"):
        event_endpoints("http://x", events_url="tcp://x:65535", ranks=2)
    with pytest.raises(ConfigError, match="ranks"):
        event_endpoints("http://x", ranks=0)
    with pytest.raises(ConfigError, match="several ranks"):
        event_endpoints("http://x", events_url="ipc:///run/e", ranks=2)


def test_no_port_is_taken_twice() -> None:
    places = event_endpoints("http://x", ranks=4)
    assert len({each for place in places for each in (place.events, place.replay)}) == 8
    with pytest.raises(ConfigError, match="both use tcp://x:5558"):
        event_endpoints("http://x", events_url="tcp://x:5558")
    with pytest.raises(ConfigError, match="both use tcp://x:6001"):
        event_endpoints("http://x", events_url="tcp://x:6000", replay_url="tcp://x:6001", ranks=2)
