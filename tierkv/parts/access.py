"""Credentials for other processes of the cluster, from the ``cluster`` settings.

Called by the composition root and by the verbs that ask a running cluster.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from tierkv.kvcore.errors import ConfigError
from tierkv.kvwire.credentials import ClusterToken, TlsFiles, TokenFile, client_context, pem_of
from tierkv.settings import ClusterSettings, Settings


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """Token and certificate files; None stands for none.

    Attributes:
        token: shown to other processes, and required from them.
        tls: certificate files for all connections between processes.
    """

    token: ClusterToken | None = None
    tls: TlsFiles | None = None


def cluster_access(cluster: ClusterSettings) -> ClusterAccess:
    """Return the access that the settings give.

    Raises:
        ConfigError: a file can't be used, or some of the three certificate files are missing.
    """
    token: ClusterToken | None = cluster.token or None
    if cluster.token_file:
        if cluster.token:
            raise ConfigError(
                "cluster.token and cluster.token_file are both set",
                hint="Remove cluster.token; the file's first line is the token.",
            )
        token = TokenFile(Path(cluster.token_file).expanduser())
    given = (cluster.tls_cert, cluster.tls_key, cluster.tls_ca)
    if not any(given):
        return ClusterAccess(token)
    if not all(given):
        raise ConfigError(
            "TLS between processes needs cluster.tls_cert, cluster.tls_key and cluster.tls_ca",
            hint="Every process shows a certificate, and checks those of the others.",
        )
    files = TlsFiles(*given, server_name=cluster.tls_name)
    pem_of(files, setting="cluster")
    return ClusterAccess(token, files)


def token_or_new(cluster: ClusterSettings) -> str:
    """Return the token that several processes get: the given one, or a new one without a file."""
    return cluster.token or ("" if cluster.token_file else secrets.token_urlsafe(24))


def server_tls(settings: Settings) -> TlsFiles:
    """Return the files of a pool node's data plane: its own, or the cluster's."""
    dmp, cluster = settings.dmp, settings.cluster
    if dmp.tls_cert:
        return TlsFiles(dmp.tls_cert, dmp.tls_key, dmp.tls_client_ca)
    return TlsFiles(cluster.tls_cert, cluster.tls_key, cluster.tls_ca)


def pool_tls(settings: Settings) -> TlsFiles | None:
    """Return the certificate files for connections to pool nodes; None: no TLS.

    Raises:
        ConfigError: a file can't be used. Later the error would only look like a dead node.
    """
    pool = settings.pool
    if not pool.tls_ca:
        return cluster_access(settings.cluster).tls
    files = TlsFiles(pool.tls_cert, pool.tls_key, pool.tls_ca, pool.tls_name)
    client_context(files)
    return files
