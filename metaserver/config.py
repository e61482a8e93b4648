"""Configuration of a meta server.

Made by the composition root; frozen and checked once. The default times follow one rule: a node is
suspect after three missed heartbeats and dead after five.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.request import ReusePolicy
from tierkv.kvwire.credentials import ClusterToken, TlsFiles


@dataclass(frozen=True, slots=True)
class MetaConfig:
    """Settings of a meta server.

    Attributes:
        address: ``host:port`` to listen on; port 0 lets the system choose.
        stream_port: port of the stream of locates, on the same host; 0 lets the system choose, -1
            has no stream.
        token: cluster token that every caller must send; required on a public address.
        tls: certificate files of this server, and the CA of callers; None means without TLS.
        database: file, or PostgreSQL URL, of the durable state (namespaces, cluster secret);
            ``:memory:`` keeps no state.
        cluster_secret: 16 to 64 bytes keying all block names; None: made at the first start and
            kept in ``database``. A changed secret loses every stored block.
        heartbeat_interval_s: how often nodes report.
        suspect_after_s: silence after which a node is shown as suspect.
        dead_after_s: silence after which a node's blocks are forgotten.
        forget_after_s: silence after which the node itself is forgotten.
        default_policy: policy of tenants without a namespace.
    """

    address: str = "127.0.0.1:7400"
    stream_port: int = 0
    token: ClusterToken | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    database: str = field(default=":memory:", repr=False)
    cluster_secret: bytes | None = field(default=None, repr=False)
    heartbeat_interval_s: float = 1.0
    suspect_after_s: float = 3.0
    dead_after_s: float = 5.0
    forget_after_s: float = 600.0
    default_policy: ReusePolicy = field(default_factory=ReusePolicy)

    def __post_init__(self) -> None:
        times = (
            self.heartbeat_interval_s,
            self.suspect_after_s,
            self.dead_after_s,
            self.forget_after_s,
        )
        if not 0 < times[0] < times[1] < times[2] < times[3]:
            raise ConfigError(
                "meta: heartbeat_interval_s < suspect_after_s < dead_after_s < forget_after_s "
                f"must hold and be positive, got {', '.join(map(str, times))}"
            )
        if self.cluster_secret is not None and not 16 <= len(self.cluster_secret) <= 64:
            raise ConfigError(
                f"cluster.secret must have 16 to 64 bytes, got {len(self.cluster_secret)}"
            )
