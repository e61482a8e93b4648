"""What proves that a process belongs to the cluster: certificates, and the cluster token.

Called by kvwire/channels.py, the stream of locates, the data plane (dmp/server/server.py,
dmp/transport/connection.py) and the SQL port. A server shows a certificate signed by the cluster's
CA. A server that has the CA file requires a certificate of each client too. The cluster token is
required in addition to TLS. New connections use the files as of the last second; a file that can't
be used leaves the earlier certificate in use.

A token is a text, or a file whose lines may change while processes run. The first line is shown,
and all lines are accepted. To rotate: add the new token as a second line everywhere, then make it
the first line everywhere, then remove the old line.
"""

from __future__ import annotations

import hmac
import logging
import os
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tierkv.kvcore.errors import ConfigError

log = logging.getLogger("tierkv.tls")

LOOK_S: Final = 1.0
"""Time between two looks at the files."""


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

    def stamp(self) -> tuple[int, ...]:
        """Return numbers that differ after a file was replaced; a missing file counts as 0."""
        found = []
        for path in filter(None, (self.cert, self.key, self.ca)):
            try:
                status = os.stat(path)
            except OSError:
                found.append(0)
            else:
                found += [status.st_mtime_ns, status.st_ino]
        return tuple(found)


class ChangedFiles:
    """Tells whether certificate files were replaced, looking at most once a second."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = files.stamp()
        self._looked_s = time.monotonic()

    def changed(self) -> bool:
        """Return True once after each change."""
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return False
        self._looked_s = now
        before, self._stamp = self._stamp, self._files.stamp()
        return before != self._stamp


class ServerTls:
    """The TLS context of a server, which follows its files."""

    def __init__(self, files: TlsFiles, *, setting: str, clients: bool = False) -> None:
        """Load the files.

        Args:
            files: certificate, key, and the CA of clients.
            setting: the settings' section in errors, such as ``dmp``.
            clients: people's programs connect, which may speak TLS 1.2.

        Raises:
            ConfigError: a file can't be read or has the wrong content.
        """
        self._files, self._setting = files, setting
        self._context = server_context(files, setting=setting)
        if clients:
            self._context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._changes = ChangedFiles(files)

    @property
    def context(self) -> ssl.SSLContext:
        """The context, with the certificate as of the last second."""
        self.follow()
        return self._context

    def follow(self) -> None:
        """Load replaced files; files that can't be used are logged, and change nothing."""
        if not self._changes.changed():
            return
        try:
            server_context(self._files, setting=self._setting)
            _load(self._context, self._files, setting=self._setting)
        except ConfigError as error:
            log.warning("the earlier certificate stays in use: %s", error.message)
        else:
            log.info("the certificate %s was loaded again", self._files.cert)


def server_context(files: TlsFiles, *, setting: str = "dmp") -> ssl.SSLContext:
    """Return the TLS context of a server; TLS 1.3 only.

    Raises:
        ConfigError: a file can't be read or has the wrong content.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Avoid session tickets: the connection may close before a client reads its ticket.
    context.num_tickets = 0
    _load(context, files, setting=setting)
    if files.ca:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles, *, setting: str = "pool") -> ssl.SSLContext:
    """Return the TLS context of a client, which checks the server's certificate and name.

    Raises:
        ConfigError: the CA file is missing, or a file can't be read or has the wrong content.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if not files.ca:
        raise ConfigError(
            f"TLS needs the CA that signed the certificate of the other side ({setting}.tls_ca)"
        )
    _load(context, files, setting=setting)
    return context


def pem_of(files: TlsFiles, *, setting: str) -> tuple[bytes, bytes, bytes]:
    """Return certificate, key and CA as gRPC takes them; checks them first, as gRPC does not.

    Raises:
        ConfigError: a file can't be read or has the wrong content.
    """
    server_context(files, setting=setting)
    try:
        texts = []
        for path in (files.cert, files.key, files.ca):
            with open(path, "rb") as file:
                texts.append(file.read())
    except OSError as error:
        raise ConfigError(f"{setting}.tls_...: {path} can't be read: {error.strerror}") from None
    cert, key, ca = texts
    return cert, key, ca


def _load(context: ssl.SSLContext, files: TlsFiles, *, setting: str) -> None:
    what = f"{setting}.tls_cert {files.cert}"
    try:
        if files.cert:
            context.load_cert_chain(files.cert, files.key or None, password=_no_password)
        what = f"{setting}.{'tls_client_ca' if setting == 'dmp' else 'tls_ca'} {files.ca}"
        if files.ca:
            context.load_verify_locations(files.ca)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError.
        raise ConfigError(f"{what} can't be used: {error}") from error


def _no_password() -> str:
    """Refuse an encrypted key, instead of prompting on the terminal."""
    raise ValueError("the private key is encrypted")


MAX_TOKENS: Final = 8


class TokenFile:
    """A file with a token per line; empty lines and lines that begin with # do not count."""

    def __init__(self, path: Path) -> None:
        """Read the file.

        Raises:
            ConfigError: it can't be read, or has no token or too many.
        """
        self._path = path
        self._looked_s = time.monotonic()
        self._stamp = (0, 0)
        self._tokens = self._read()

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens as of the last second; the earlier ones while the file can't be used."""
        now = time.monotonic()
        if now - self._looked_s >= LOOK_S:
            self._looked_s = now
            with suppress(ConfigError):  # A file that is being replaced; the next look finds it.
                self._tokens = self._read()
        return self._tokens

    def _read(self) -> tuple[str, ...]:
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp == self._stamp:
                return self._tokens
            lines = [line.strip() for line in self._path.read_text("ascii").splitlines()]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cluster.token_file {self._path} can't be read: {error}",
                hint="Give a file with a token per line.",
            ) from None
        tokens = tuple(line for line in lines if line and not line.startswith("#"))
        if not 0 < len(tokens) <= MAX_TOKENS:
            raise ConfigError(
                f"cluster.token_file {self._path} has {len(tokens)} tokens, not 1 to {MAX_TOKENS}"
            )
        self._stamp = stamp
        return tokens


ClusterToken = str | TokenFile
"""A token as the caller has it; None stands for no token."""


def shown(token: ClusterToken | None) -> str:
    """Return what to show a peer; empty without a token."""
    return token.tokens[0] if isinstance(token, TokenFile) else token or ""


def accepts(token: ClusterToken | None, given: str) -> bool:
    """Return whether a peer showed the right token, in constant time per token."""
    wanted = token.tokens if isinstance(token, TokenFile) else (token or "",)
    right = [hmac.compare_digest(given.encode(), each.encode()) for each in wanted]
    return any(right)
