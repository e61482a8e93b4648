"""What the HTTP door may be told.

Built by the composition root, checked once by ``HttpServer``. Without keys everybody is one
tenant, so then only this machine may connect.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcore.errors import ConfigError

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Address, keys and times.

    Attributes:
        host: address to listen on.
        port: 0 lets the system choose.
        api_keys: Bearer key to tenant; empty lets everybody in as ``default``.
        keep_alive_interval_s: how often a waiting stream gets a comment; proxies cut silent ones.
        first_event_wait_s: an error within this time answers with its own HTTP status, a later
            one inside the stream.
        drain_timeout_s: how long ``stop`` waits for running requests.
        default_temperature: of requests that name none; 1.0 is what OpenAI documents.
    """

    host: str = "127.0.0.1"
    port: int = 8_000
    api_keys: Mapping[str, str] = field(default_factory=dict)
    keep_alive_interval_s: float = 10.0
    first_event_wait_s: float = 2.0
    drain_timeout_s: float = 5.0
    default_temperature: float = 1.0

    def check(self) -> None:
        """Refuse to serve strangers without keys.

        Raises:
            ConfigError: a public address without keys, or a port that is none.
        """
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"http port {self.port} is not in [0, 65535]")
        if not self.api_keys and not is_loopback(self.host):
            raise ConfigError(
                f"refusing to serve HTTP on {self.host} without API keys",
                hint="set front.api_keys, or listen on 127.0.0.1",
            )
        if any(not key or not tenant for key, tenant in self.api_keys.items()):
            raise ConfigError("front.api_keys has an empty key or tenant")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
