"""Keys of blocks inside other engines: tenants' salts, and the parts of a block that ranks hold.

The engine's compute node (integrations/remote) sends a tenant's key as the ``cache_salt`` of a
request. The engine hashes the salt into its own block names, so tenants share nothing inside the
engine. The engine also passes the salt to TierKV's classes in the engine's process, which can then
name blocks as the scheduler does (kvcore/block.py). vLLM accepts at most 128 characters, none
of ``@``, ``/``, ``\\`` or NUL.

With tensor parallelism each rank computes the KV of its own heads. A block of a one-rank engine has
the same name as in the scheduler. Each part of a divided block has a separate name in another hash
domain. Engines divided in different ways therefore never share a part.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from tierkv.kvcore.ids import BLOCK_KEY_BYTES, NAMESPACE_KEY_BYTES, BlockKey, NamespaceKey

_MARK: Final = "tierkv1"
_UNCACHED: Final = "tierkv1-uncached-"
_IDENTITY_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class TenantSalt:
    """The content of a salt made by TierKV.

    Attributes:
        namespace_key: names the tenant's blocks of one model and layout.
        identity: digest of the key's model and layout (``identity_digest``); an engine with another
            model or layout must not use the key.
    """

    namespace_key: NamespaceKey
    identity: bytes

    def __str__(self) -> str:
        parts = (_text(self.namespace_key), _text(self.identity))
        return ".".join((_MARK, *parts))


def uncached_salt(nonce: str) -> str:
    """Return a salt for a request that neither finds nor leaves KV; use each ``nonce`` once."""
    return f"{_UNCACHED}{nonce}"


def is_uncached(text: str | None) -> bool:
    """True for a salt from ``uncached_salt``; code inside the engine keeps no KV of the request."""
    return text is not None and text.startswith(_UNCACHED)


def identity_digest(identity: str) -> bytes:
    """Digest ``ModelInfo.identity`` to 16 bytes."""
    return blake2b(identity.encode(), digest_size=_IDENTITY_BYTES, person=b"tierkv-salt").digest()


def parse_salt(text: str) -> TenantSalt | None:
    """Parse a salt made by TierKV; None for every other text."""
    parts = text.split(".")
    if len(parts) != 3 or parts[0] != _MARK:
        return None
    try:
        key, identity = (urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in parts[1:])
    except (Base64Error, ValueError):
        return None
    if len(key) != NAMESPACE_KEY_BYTES or len(identity) != _IDENTITY_BYTES:
        return None
    return TenantSalt(NamespaceKey(key), identity)


def user_namespace(base: NamespaceKey, salt: str | None) -> NamespaceKey:
    """Derive the key for a request without a salt or with a salt not made by TierKV.

    Args:
        base: the engine's own key, of its default tenant, model and layout.
        salt: any text, also with lone surrogates. None returns ``base``; an empty text gives
            another key.
    """
    if salt is None:
        return base
    mac = blake2b(key=base, digest_size=NAMESPACE_KEY_BYTES, person=b"tierkv-usersalt")
    mac.update(salt.encode("utf-8", "surrogatepass"))
    return NamespaceKey(mac.digest())


def _text(raw: bytes) -> str:
    return urlsafe_b64encode(raw).decode().rstrip("=")


def rank_key(key: BlockKey, rank: int, ranks: int) -> BlockKey:
    """Return the key of one rank's part of a block; with one rank, the key of the block.

    Raises:
        ValueError: the rank does not exist.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}")
    if ranks == 1:
        return key
    mac = blake2b(key, digest_size=BLOCK_KEY_BYTES, person=b"tierkv-rank")
    mac.update(rank.to_bytes(4, "little") + ranks.to_bytes(4, "little"))
    return BlockKey(mac.digest())
