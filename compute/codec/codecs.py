"""Every codec of one node, created on first use; a request's namespace decides which codec to use.

Owned by L1 pages (compute/model/pages.py). Without calibrated tables the codecs based on tables are
missing: requests for these codecs neither publish nor load, and the answers stay exact.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tierkv.compute.codec.calibration import Calibration
from tierkv.compute.codec.entropy import EntropyCodec
from tierkv.compute.codec.layer_codec import LayerCodec, make_codec
from tierkv.kvcore.layout import BlockLayout, KvCodec


class Codecs:
    """Codecs for blocks of one shape.

    Thread-safe: two threads may create the same codec twice, which does no harm.

    Attributes:
        layout: the node's layout; its codec is the default.
    """

    def __init__(
        self, layout: BlockLayout, calibration: Calibration | None, *, device: torch.device
    ) -> None:
        self.layout = layout
        self._calibration = calibration
        self._device = device
        self._fixed: dict[KvCodec, LayerCodec] = {}
        self._entropy: EntropyCodec | None = None

    def has(self, codec: KvCodec) -> bool:
        """Whether this node can store KV under the codec."""
        return codec.has_fixed_size or self._calibration is not None

    def layout_of(self, codec: KvCodec) -> BlockLayout:
        """Return the layout with the given codec, for its sizes."""
        return self.layout if codec is self.layout.codec else replace(self.layout, codec=codec)

    def fixed(self, codec: KvCodec) -> LayerCodec:
        """Return a codec of fixed size."""
        if codec not in self._fixed:
            self._fixed[codec] = make_codec(self.layout_of(codec))
        return self._fixed[codec]

    @property
    def entropy(self) -> EntropyCodec:
        """The codec of all entropy levels; ``has`` must hold."""
        assert self._calibration is not None, "asked for a codec that this node does not have"
        if self._entropy is None:
            self._entropy = EntropyCodec(self.layout, self._calibration, device=str(self._device))
        return self._entropy
