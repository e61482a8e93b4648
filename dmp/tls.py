"""TLS for the data plane: contexts from certificate files, 1.3 only.

Called by dmp/server/server.py and dmp/transport/connection.py. The server shows a certificate
signed by the cluster's CA; where it is given that CA itself, clients must show one too. The cluster
token is asked for all the same.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from tierkv.kvcore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files; empty means none.

    Attributes:
        cert: own certificate, with its chain. A server needs one.
        key: its private key.
        ca: who signs the peers' certificates. A client needs it; a server that has it lets in
            only clients that show a certificate.
        server_name: name the server's certificate must bear; empty means the host of its address.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""
    server_name: str = ""

    @property
    def serves(self) -> bool:
        """Whether a server with these files speaks TLS."""
        return bool(self.cert)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return what accepts TLS connections.

    Raises:
        ConfigError: a file can't be read or is not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # A ticket would be sent over a connection that is closed before anyone reads it.
    context.num_tickets = 0
    _load(context, files, cert="dmp.tls_cert", ca="dmp.tls_client_ca")
    if files.ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return what makes TLS connections; the server's certificate and name are checked.

    Raises:
        ConfigError: a file can't be read or is not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if not files.ca:
        raise ConfigError("TLS to the pool needs the CA that signed its certificate (pool.tls_ca)")
    _load(context, files, cert="pool.tls_cert", ca="pool.tls_ca")
    return context


def _load(context: ssl.SSLContext, files: TlsFiles, *, cert: str, ca: str) -> None:
    what = f"{cert} {files.cert}"
    try:
        if files.cert:
            context.load_cert_chain(files.cert, files.key or None, password=_no_password)
        what = f"{ca} {files.ca}"
        if files.ca:
            context.load_verify_locations(files.ca)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError.
        raise ConfigError(f"{what} can't be used: {error}") from error


def _no_password() -> str:
    """Refuse an encrypted key, instead of asking the terminal."""
    raise ValueError("the private key is encrypted")
