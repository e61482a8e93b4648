"""Access to the pool: a mapping in an engine's own configuration.

vLLM passes the mapping as ``kv_connector_extra_config``, SGLang as ``extra_config``. The mapping is
read once, when the engine starts. Unknown names and invalid values are refused by name, with a
suggestion, because a silently ignored setting shows only as a cache without hits.
"""

from __future__ import annotations

import difflib
import re
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, Self

from tierkv.dmp.client.values import parse_addresses, to_transport
from tierkv.kvcore import limits
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.ids import HostId
from tierkv.kvwire.credentials import ClusterToken, TlsFiles, TokenFile

_NUMBERS: Final = {
    "timeout_ms": (10, 600_000),
    "threads": (1, 64),
    "cross_zone_rate": (0, 1 << 50),
}
_MOST_SECRET_BYTES: Final = 4_096
_NAMED: Final = ("tenant", "node_id", "host", "zone")
_SECRETS: Final = ("token", "secret")


@dataclass(frozen=True, slots=True)
class PoolAccess:
    """Access of an engine to the pool.

    Attributes:
        pool: addresses of DMP nodes; empty: the meta server is asked repeatedly.
        meta: ``host:port`` of the meta server; of several, separated by commas; empty: the pool has
            no meta server.
        token: the cluster token; empty if none is set.
        token_file: a file with the token, to keep the token out of command lines; read again when
            it changes (kvwire/credentials.py).
        secret: keys the names of blocks without a meta server; engines that share blocks have the
            same secret.
        secret_file: a file with the secret.
        tenant: the tenant for requests that name no tenant.
        transport: ``auto``, ``shm``, ``rdma`` or ``tcp``.
        tls_ca: authority of the pool nodes' certificates; empty: plain connections.
        tls_meta: the meta servers speak TLS with the same certificates (``cluster.tls_cert``).
        tls_cert: the engine's client certificate.
        tls_key: key of ``tls_cert``.
        tls_name: the name in the nodes' certificates, if different from the host name.
        timeout_ms: longest silence within one call to a pool node.
        threads: number of concurrent calls to the pool.
        node_id: the engine's name in the cluster; empty: made from host and process.
        host: this machine's name in the cluster; empty: the system's host name.
        zone: this machine's zone, as ``cluster.zone`` of the nodes; empty: it has none.
        cross_zone_rate: bytes per second exchanged with pool nodes of other zones, on average; 0:
            no limit.
    """

    pool: tuple[str, ...] = ()
    meta: str = ""
    token: str = field(default="", repr=False)
    token_file: str = ""
    secret: str = field(default="", repr=False)
    secret_file: str = ""
    tenant: str = "default"
    transport: str = "auto"
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_name: str = ""
    tls_meta: bool = False
    timeout_ms: int = 2_000
    threads: int = 4
    node_id: str = ""
    host: str = ""
    zone: str = ""
    cross_zone_rate: int = 0

    @classmethod
    def read(
        cls, given: Mapping[str, Any], *, also: Collection[str] = (), where: str = "extra config"
    ) -> Self:
        """Check and convert the mapping of an engine.

        Args:
            given: names and values; ``pool`` may be a list or separated by commas.
            also: names in the same mapping for another reader.
            where: name of the mapping, for messages.

        Raises:
            ConfigError: an unknown name or an invalid value.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known and name not in also:
                raise _unknown(str(name), [*known, *also], where)
        values = {name: _value(name, given[name], where) for name in known if name in given}
        settings = cls(**values)
        settings._check(where)
        if settings.token_file:
            settings = replace(settings, token=_file_text("token", settings.token_file, where))
        if settings.secret_file:
            settings = replace(settings, secret=_file_text("secret", settings.secret_file, where))
        settings._check_secret(where)
        return settings

    @property
    def tls(self) -> TlsFiles | None:
        """Certificate files; None if connections are plain."""
        if not self.tls_ca:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca, self.tls_name)

    @property
    def meta_tls(self) -> TlsFiles | None:
        """Certificate files for the meta servers; None if these connections are plain."""
        return self.tls if self.tls_meta else None

    @property
    def cluster_token(self) -> ClusterToken:
        """The token, which follows its file; empty if none is set."""
        return TokenFile(Path(self.token_file)) if self.token_file else self.token

    @property
    def host_id(self) -> HostId:
        """The name of this machine in the cluster."""
        return HostId(self.host or socket.gethostname())

    @property
    def secret_bytes(self) -> bytes:
        """The secret as bytes, also with lone surrogates."""
        return self.secret.encode("utf-8", "surrogatepass")

    def _check(self, where: str) -> None:
        if not self.pool and not self.meta:
            raise ConfigError(
                f"{where}: neither pool nor meta is given",
                hint='Give "pool": "HOST:PORT" of `tierkv serve dmp`, or "meta": "HOST:PORT" of '
                "the cluster's meta server.",
            )
        to_transport(self.transport)
        if self.meta:
            parse_addresses(self.meta)
        for name in _SECRETS:
            if getattr(self, name) and getattr(self, f"{name}_file"):
                raise ConfigError(
                    f"{where}: {name} and {name}_file are both given", hint="Give one of them."
                )
        if not self.tls_ca and (self.tls_cert or self.tls_key or self.tls_name or self.tls_meta):
            raise ConfigError(f"{where}: tls_cert, tls_key, tls_name and tls_meta need tls_ca")
        for name in _NAMED:
            value = getattr(self, name)
            if value and not re.fullmatch(limits.NAME_PATTERN, value):
                raise ConfigError(
                    f"{where}: {name} = {value[:40]!r} is not a valid name",
                    hint=f"Use 1 to {limits.MAX_NAME_CHARS} letters, digits and _ . : - /.",
                )

    def _check_secret(self, where: str) -> None:
        if self.secret and not 16 <= len(self.secret_bytes) <= 64:
            raise ConfigError(f"{where}: secret must have 16 to 64 bytes")
        if self.secret and self.meta:
            raise ConfigError(
                f"{where}: secret and meta are both given",
                hint="Leave secret out; keys come from the meta server.",
            )


def _value(name: str, given: Any, where: str) -> Any:
    """Check a value and convert the value to the type of the field."""
    shown = "a secret" if name in _SECRETS else repr(given)[:80]
    if name in _NUMBERS:
        least, most = _NUMBERS[name]
        if type(given) is not int or not least <= given <= most:
            raise ConfigError(
                f"{where}: {name} = {shown} is not a whole number from {least} to {most}"
            )
        return given
    if name == "pool" and isinstance(given, list) and all(isinstance(a, str) for a in given):
        given = ",".join(given)
    if not isinstance(given, str):
        raise ConfigError(f"{where}: {name} = {shown} is not text")
    return tuple(parse_addresses(given)) if name == "pool" and given else given or _default(name)


def _default(name: str) -> Any:
    """Return the default of a field, which an empty text stands for."""
    return next(field.default for field in fields(PoolAccess) if field.name == name)


def _file_text(name: str, path: str, where: str) -> str:
    try:
        with Path(path).expanduser().open("rb") as file:
            raw = file.read(_MOST_SECRET_BYTES + 1)
        text = raw.decode().strip()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: unknown ~user.
        raise ConfigError(f"{where}: {name}_file {path!r} can't be read: {error}") from error
    if not text or len(raw) > _MOST_SECRET_BYTES:
        raise ConfigError(f"{where}: {name}_file {path} holds no {name}")
    return text


def _unknown(name: str, known: list[str], where: str) -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else f"Known settings: {', '.join(sorted(known))}."
    return ConfigError(f"{where}: unknown setting {name[:40]!r}. {hint}", hint=hint)
