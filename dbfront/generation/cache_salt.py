"""A caller's salt: KV of its own inside its tenant.

dbfront/generation/generation.py looks the tenant's policy up by the tenant and its key by the
salted name, so a salt keeps blocks apart and changes nothing of what the tenant may do.
"""

from __future__ import annotations

from hashlib import blake2b


def salted_tenant(tenant: str, salt: str | None) -> str:
    """Isolate a salt inside its tenant; the name has a digest, so that nobody can pick it."""
    if not salt:
        return tenant
    digest = blake2b(f"{tenant}\0{salt}".encode(), digest_size=16).hexdigest()
    return f"{tenant[:80]}:salt-{digest}"
