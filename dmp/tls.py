"""TLS for the data plane: contexts from certificate files, TLS 1.3 only.

Called by dmp/server/server.py and dmp/transport/connection.py. The server shows a certificate
signed by the cluster's CA. A server that has the CA file requires a certificate of each client too.
The cluster token is required in addition to TLS.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from tierkv.kvcore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files; an empty path means no file.

    Attributes:
        cert: own certificate, with its chain. A server needs a certificate.
        key: private key of the certificate.
        ca: CA that signs the peers' certificates. A client needs this file; a server with this file
            accepts only clients that show a certificate.
        server_name: name that the server's certificate must bear; empty means the host of its
            address.
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
    """Return the TLS context of a server.

    Raises:
        ConfigError: a file can't be read or has the wrong content.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Avoid session tickets: the connection may close before a client reads its ticket.
    context.num_tickets = 0
    _load(context, files, cert="dmp.tls_cert", ca="dmp.tls_client_ca")
    if files.ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the TLS context of a client, which checks the server's certificate and name.

    Raises:
        ConfigError: the CA file is missing, or a file can't be read or has the wrong content.
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
    """Refuse an encrypted key, instead of prompting on the terminal."""
    raise ValueError("the private key is encrypted")
