"""REST keys that the meta server keeps: made by ``tierkv key create``, stored as hashes.

Pure values. Every front reads the keys (tierkv/parts/record_follower.py) and lets owners of keys in
(dbfront/http/key_ring.py). A key has 256 random bits, so a plain SHA-256 can't be tried backwards.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

RECORD_KIND: Final = "key"
"""Kind of the records that hold keys (metaserver/client.py::ClusterRecord)."""

PREFIX: Final = "tk-"
"""Begins every key, so that scanners of source code find keys that were committed."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret.

    Attributes:
        name: unique; the name in limits and in the audit log.
        tenant: whoever uses the key acts as this tenant, which is a SQL user.
        digest: SHA-256 of the key, as 64 hexadecimal digits.
        made_unix_s: when it was made.
    """

    name: str
    tenant: str
    digest: str
    made_unix_s: float = 0.0

    def to_json(self) -> str:
        """Return the body of the key's record."""
        return json.dumps(
            {"tenant": self.tenant, "digest": self.digest, "made_unix_s": self.made_unix_s}
        )


def new_key() -> str:
    """Return a new random key."""
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """Return the digest under which a key is stored."""
    return hashlib.sha256(key.encode()).hexdigest()


def keys_of(records: Iterable[Any]) -> dict[str, ApiKey]:
    """Return the keys among records by digest; an unreadable record opens no door.

    Args:
        records: have ``kind``, ``name`` and ``body``.
    """
    found: dict[str, ApiKey] = {}
    for record in records:
        if record.kind != RECORD_KIND:
            continue
        try:
            told = json.loads(record.body)
            made_s = float(told.get("made_unix_s", 0.0))
            key = ApiKey(record.name, str(told["tenant"]), str(told["digest"]), made_s)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        found[key.digest] = key
    return found
