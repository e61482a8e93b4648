"""Who a REST client is: keys of the configuration, and keys that the meta server keeps.

Used by dbfront/http/app.py for every request. Keys of the configuration stay as long as the process
runs; the others come and go within a second (tierkv/parts/record_follower.py).
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from tierkv.dbfront.http.config import DEFAULT_TENANT, HASH_PREFIX, HttpConfig
from tierkv.kvcore.access import ApiKey, digest_of
from tierkv.kvcore.errors import AuthenticationError


@dataclass(frozen=True, slots=True)
class RestCaller:
    """Whoever sent a request.

    Attributes:
        tenant: on whose behalf.
        key: name of the key; empty for keys of the configuration, and without keys.
    """

    tenant: str = DEFAULT_TENANT
    key: str = ""


class KeyRing:
    """The keys that open this door.

    Attributes:
        config: has the keys of the configuration.
        stored: keys of the meta server by digest; replaced when they change.
    """

    def __init__(self, config: HttpConfig) -> None:
        self.stored: Mapping[str, ApiKey] = {}
        self.config = config

    def caller(self, authorization: str | None) -> RestCaller:
        """Return who sends a header; without any key or user all clients are one tenant.

        Raises:
            AuthenticationError: the key is missing or unknown, or only SQL users are configured.
        """
        if not self.config.api_keys and not self.stored:
            if self.config.has_users:
                raise AuthenticationError(
                    "front.users requires passwords of SQL clients, but there is no REST key",
                    hint="Set front.api_keys to let REST clients in, or run `tierkv key create`.",
                )
            return RestCaller()
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise AuthenticationError(
                "no API key was sent", hint="Send the header Authorization: Bearer KEY."
            )
        clear = given.strip()
        digest = digest_of(clear)
        kept = self.stored.get(digest)
        if kept is not None:
            return RestCaller(kept.tenant, kept.name)
        found = None
        for key, tenant in self.config.api_keys.items():
            hashed = key.startswith(HASH_PREFIX)
            wanted = key.removeprefix(HASH_PREFIX).lower() if hashed else key
            if hmac.compare_digest(wanted.encode(), (digest if hashed else clear).encode()):
                found = RestCaller(tenant)
        if found is None:
            raise AuthenticationError("the API key is not valid")
        return found
