"""Which requests the HTTP door answers, and on whose account.

Pure: headers in, a tenant or an error out. The Host and Origin checks keep web pages that are open
on the same machine away from a door that only loopback protects: a page can send requests there,
and by DNS rebinding read the answers, but it cannot choose these headers, nor send
``application/json`` elsewhere without asking first.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from tierkv.dbfront.http.config import DEFAULT_TENANT, HASH_PREFIX, HttpConfig
from tierkv.kvcore.errors import AuthenticationError

PUBLIC_PATHS = frozenset({"/livez", "/readyz", "/health"})
"""The only endpoints without authentication, and for probes under any host name."""

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})


def admit(config: HttpConfig, method: str, path: str, headers: Headers) -> str:
    """Check one request's headers; answers the tenant it is accounted to.

    Raises:
        AuthenticationError: no key or an unknown one.
        HTTPException: 421 for a host this door does not serve, 403 for another site's page, 415
            for a body that is not declared as JSON.
    """
    if path in PUBLIC_PATHS:
        return DEFAULT_TENANT
    _check_host(config, headers.get("host", ""))
    if method not in _SAFE_METHODS:
        _check_origin(config, headers)
    tenant = tenant_for(config, headers.get("authorization"))
    if method not in _SAFE_METHODS:
        _check_content_type(headers.get("content-type", ""))
    return tenant


def tenant_for(config: HttpConfig, authorization: str | None) -> str:
    """Map a Bearer key to its tenant; without configured keys or users everybody is one tenant.

    Raises:
        AuthenticationError: the key is missing or unknown, or there are only SQL users.
    """
    if not config.api_keys:
        if config.has_users:
            raise AuthenticationError(
                "front.users asks SQL clients for a password, and no REST key is configured",
                hint="set front.api_keys to let REST clients in",
            )
        return DEFAULT_TENANT
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        raise AuthenticationError(
            "no API key was sent", hint="send the header Authorization: Bearer KEY"
        )
    found = None
    clear = given.strip().encode()
    digest = hashlib.sha256(clear).hexdigest().encode()
    for key, tenant in config.api_keys.items():
        hashed = key.startswith(HASH_PREFIX)
        wanted = key.removeprefix(HASH_PREFIX).lower() if hashed else key
        if hmac.compare_digest(wanted.encode(), digest if hashed else clear):
            found = tenant
    if found is None:
        raise AuthenticationError("the API key is not known here")
    return found


def _check_host(config: HttpConfig, host: str) -> None:
    served = config.served_hosts
    if served and host_name(host) not in served:
        raise HTTPException(
            421,
            f"this front is not called {host_name(host)!r} "
            "(add the name to front.allowed_hosts, or call it by its address)",
        )


def _check_origin(config: HttpConfig, headers: Headers) -> None:
    """Browsers name the site a request comes from; other clients send no Origin."""
    origin = headers.get("origin")
    if origin is None:
        return
    netloc = urlsplit(origin).netloc.lower()
    if netloc and netloc == headers.get("host", "").lower():
        return
    if host_name(netloc) in config.allowed_hosts:
        return
    raise HTTPException(
        403,
        f"pages of {origin[:200]!r} may not send requests here "
        "(add the site's host to front.allowed_hosts)",
    )


def _check_content_type(given: str) -> None:
    kind = given.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    raise HTTPException(
        415,
        f"the body is declared as {kind[:100] or 'nothing'!r}, not as JSON "
        "(send the header Content-Type: application/json; "
        "curl: -H 'Content-Type: application/json')",
    )


def host_name(host: str) -> str:
    """Take the port off a Host header or a URL's host and port; IPv6 keeps no brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, _ = host.partition(":")
    return name.rstrip(".")
