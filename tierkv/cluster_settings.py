"""Settings that all processes of a cluster share, and the base of every section of settings.

Part of tierkv/settings.py, where the other sections are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from tierkv.kvcore import limits


class Section(BaseModel):
    """A table of the TOML file; the loader refuses unknown keys with a suggestion."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ClusterSettings(Section):
    """Settings shared by all processes of a cluster."""

    run_dir: Path = Field(
        default=Path("~/.local/state/tierkv"),
        description="where a cluster on this machine keeps logs, addresses and databases",
    )
    token: str = Field(
        default="",
        description="secret shared by all nodes; required to listen beyond loopback",
    )
    token_file: str = Field(
        default="",
        description="file with the token instead, read again when it changes: the first line is "
        "shown, all lines are accepted",
    )
    tls_cert: str = Field(
        default="",
        description="PEM certificate for TLS between processes; needs tls_key and tls_ca, too",
    )
    tls_key: str = Field(default="", description="PEM key of that certificate")
    tls_ca: str = Field(default="", description="PEM CA of the certificates of all processes")
    tls_name: str = Field(
        default="", description="name in these certificates; empty: the host of each address"
    )
    secret: str = Field(
        default="",
        description="key of the block hashes, 16 to 64 bytes; empty: created at first start",
    )
    meta_address: str = Field(
        default="", description="host:port of the meta server; of several, separated by commas"
    )
    host: str = Field(
        default="", description="name of this machine; nodes of one host share memory (L2)"
    )
    zone: str = Field(
        default="",
        pattern=f"^({limits.NAME_PATTERN})?$",
        description="this machine's zone; KV is read and stored in the own zone where possible",
    )
    cross_zone_rate: ByteSize = Field(
        default=ByteSize(0),
        description="bytes of KV per second that a node exchanges with pool nodes of other zones, "
        "on average, such as 100MiB; beyond it KV is computed or not stored; 0: no limit",
    )
    advertise: str = Field(
        default="", description="name by which others reach this machine; empty: the bound address"
    )
    start_wait_s: float = Field(
        default=0.0,
        ge=0.0,
        description="longest time a starting role waits for the meta server before it continues "
        "without it",
    )
    start_nodes: int = Field(
        default=0,
        ge=0,
        description="compute nodes that a starting front waits for, at most start_wait_s",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lowest level that is logged"
    )
