"""A namespace's permissions beyond exact reuse: lossy KV codecs and blending, both off by default.

The meta server stores the policy durably and grants the policy with the namespace key. The front
applies the policy to each request.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import BlendSelector


@dataclass(frozen=True, slots=True)
class ReusePolicy:
    """How far answers of a namespace may depart from full recomputation.

    Attributes:
        kv_codec: encoding of KV below L1; None means each node's own codec. A change renames the
            namespace's blocks, so blocks stored under the old codec are not found again.
        blend: whether callers may reuse chunks at any position.
        recompute_ratio: default share of a chunk's tokens that are computed again, in (0, 1]; a
            call may ask for a larger share only.
        selector: default selector of the tokens to compute again.
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
