"""What a namespace allows beyond exact reuse: lossy KV codecs and blending, both off by default.

Durable in the meta server, granted with the namespace key, applied by the front to each request.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import BlendSelector


@dataclass(frozen=True, slots=True)
class ReusePolicy:
    """How far answers of a namespace may depart from full recomputation.

    Attributes:
        kv_codec: how its KV is encoded below L1; None takes each node's own codec. Changing it
            renames the namespace's blocks: what was stored under the old codec is not found again.
        blend: whether callers may have chunks reused at any position.
        recompute_ratio: default share of a chunk's tokens that are computed again, in (0, 1];
            a call may ask for more, never for less.
        selector: which tokens, unless the call says so.
        gradual: see tierkv.kvcore.request.Blend.
    """

    kv_codec: KvCodec | None = None
    blend: bool = False
    recompute_ratio: float = 0.15
    selector: BlendSelector = BlendSelector.HKVD
    gradual: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.recompute_ratio <= 1.0:
            raise ValueError(f"recompute_ratio must be in (0, 1], got {self.recompute_ratio}")
