"""Settings of a DMP node: name, memory file, TCP and RDMA listeners, background work.

The composition root builds a DmpConfig from the configuration file. DmpConfig validates the values
once, here, and the rest of the room trusts them.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import NO_ZONE, HostId, NodeId, ZoneId
from tierkv.kvwire.credentials import ClusterToken, TlsFiles
from tierkv.policies.select import PRODUCTION_POLICIES

DEFAULT_SEGMENT_FOLDER: Final = "/dev/shm"
MIN_SLOT_BYTES: Final = 32 << 10
"""Smallest slot; bounds the header table to about 1 % of the segment."""

MAX_RESERVE_S: Final = 300.0
MAX_HOLD_S: Final = 3_600.0
"""Longest reservation and hold, whatever a client asks for: a lost client must not block memory for
good."""

SLOT_ALIGN: Final = 4096
"""Payloads start on page borders, as O_DIRECT, RDMA registration and cudaHostRegister prefer."""


@dataclass(frozen=True, slots=True)
class DmpConfig:
    """Settings of one DMP node.

    Attributes:
        node_id: unique and stable; names the default segment file.
        host: name of the machine; compute nodes with the same host map the segment (tier L2).
        zone: the machine's zone; empty if it has none.
        segment_path: path of the memory file; empty means ``/dev/shm/tierkv-<node_id>.seg``.
        capacity_bytes: payload memory, rounded down to whole extents; allocated as blocks arrive.
        ready_ahead_bytes: how much memory is made ready before blocks arrive.
        extent_bytes: unit of memory, assigned to one slot size at a time; no block can be larger.
        bind: address to listen on; any address but loopback needs a ``token``.
        port: port to listen on; 0 lets the system choose.
        advertise_host: address that other machines connect to; empty means ``bind``.
        token: cluster token that every client must show; empty means no token is required.
        tls: certificate files; without a certificate the TCP server speaks plain TCP.
        rdma: ``auto`` serves RDMA if the machine has a device and TLS is off, because RDMA does not
            encrypt; ``on`` serves RDMA if the machine has a device; ``off`` never does.
        rdma_devices: names of the devices to use; empty means all.
        tick_interval_s: time between sweeps of expired reservations and holds.
        frame_timeout_s: longest silence inside a frame before a peer is dropped.
        max_connections: maximum number of connections; further connections are closed at once.
        attach_wait_s: how long a start waits for the process that still owns the segment.
        drain_s: how long a stop waits for open reservations and transfers.
        scrub_rate_bytes_per_s: rate of the background check of sealed blocks; 0 turns the check
            off.
        damage_alert_per_hour: bad slots in an hour that raise an alarm in the log.
        demote_above: share of the memory in use above which blocks are copied to the lower tier,
            the next eviction victims first; blocks below that share are not copied.
        promote_threads: maximum number of concurrent reads from the lower tier.
        promote_timeout_s: longest wait for a read from the lower tier; a later block counts as a
            miss.
        eviction_policy: name of the policy that chooses eviction victims (policies/select.py).
        lease_share: maximum share of the memory that leases keep from eviction.
        owner_folder: folder of the cluster that owns the segment; a cleaner may remove a segment
            whose folder is gone. Empty for no owner.
        remove_on_stop: unlink the segment at a clean stop.
        nameless: unlink the segment as soon as it is open, for clusters in a single process: no
            other process can map the segment, and no memory stays behind however the process ends.
    """

    node_id: NodeId
    host: HostId
    _: KW_ONLY
    zone: ZoneId = NO_ZONE
    segment_path: str = ""
    capacity_bytes: int = 1 << 30
    ready_ahead_bytes: int = 128 << 20
    extent_bytes: int = 32 << 20
    bind: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    token: ClusterToken = field(default="", repr=False)
    tls: TlsFiles = field(default_factory=TlsFiles)
    rdma: str = "auto"
    rdma_devices: tuple[str, ...] = ()
    tick_interval_s: float = 1.0
    frame_timeout_s: float = 30.0
    max_connections: int = 512
    attach_wait_s: float = 5.0
    drain_s: float = 1.0
    scrub_rate_bytes_per_s: int = 64 << 20
    damage_alert_per_hour: int = 3
    demote_above: float = 0.85
    promote_threads: int = 4
    promote_timeout_s: float = 10.0
    eviction_policy: str = "default"
    lease_share: float = 0.5
    owner_folder: str = ""
    remove_on_stop: bool = False
    nameless: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(limits.NAME_PATTERN, self.node_id):
            raise ConfigError(f"dmp.node_id {self.node_id!r} is not a name")
        if self.extent_bytes < MIN_SLOT_BYTES or self.extent_bytes % SLOT_ALIGN:
            raise ConfigError(
                f"dmp.extent_bytes must be a multiple of {SLOT_ALIGN} and at least "
                f"{MIN_SLOT_BYTES}, got {self.extent_bytes}"
            )
        if self.capacity_bytes < self.extent_bytes:
            raise ConfigError(
                f"dmp.capacity {self.capacity_bytes} is smaller than one extent "
                f"({self.extent_bytes}); raise it"
            )
        if self.rdma not in ("auto", "on", "off"):
            raise ConfigError(f"dmp.rdma must be auto, on or off, got {self.rdma!r}")
        if not 0.0 <= self.demote_above <= 1.0:
            raise ConfigError(f"dmp.demote_above must be in [0, 1], got {self.demote_above}")
        if self.eviction_policy not in PRODUCTION_POLICIES:
            known = ", ".join(sorted(PRODUCTION_POLICIES))
            raise ConfigError(f"dmp.eviction_policy {self.eviction_policy!r} is none of {known}")
        if not 0.0 <= self.lease_share < 1.0:
            raise ConfigError(f"dmp.lease_share must be in [0, 1), got {self.lease_share}")
        if self.damage_alert_per_hour < 1 or self.promote_threads < 1:
            raise ConfigError("damage_alert_per_hour and promote_threads must be at least 1")
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"dmp.port must be in [0, 65535], got {self.port}")
        if not self.token and not _is_loopback(self.bind):
            raise ConfigError(
                f"dmp.bind {self.bind} is reachable from other machines but no cluster token is "
                "set; set cluster.token or bind 127.0.0.1"
            )

    @property
    def segment_file(self) -> Path:
        """Path of the memory file."""
        if self.segment_path:
            return Path(self.segment_path)
        safe = re.sub(r"[^A-Za-z0-9_.-]", "_", self.node_id)
        return Path(DEFAULT_SEGMENT_FOLDER) / f"tierkv-{safe}.seg"

    @property
    def extent_count(self) -> int:
        """Whole extents in the capacity."""
        return self.capacity_bytes // self.extent_bytes

    @property
    def extents_ahead(self) -> int:
        """Extents that are made ready before blocks arrive; at least one."""
        return max(1, self.ready_ahead_bytes // self.extent_bytes)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
