"""KV through every codec on a CUDA device: the same bounds as on the CPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tierkv.compute.codec.entropy import (  # noqa: E402
    LEVELS,
    CodecLevel,
    make_calibration,
)
from tierkv.compute.model.pages import L1Pages  # noqa: E402
from tierkv.kvcore.layout import BlockLayout, KvCodec, KvDtype  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
LAYOUT = BlockLayout(2, 2, 16, KvDtype.BFLOAT16, 16)


def pages_on(device: str, codec: KvCodec) -> L1Pages:
    mean = torch.full((2, 2, 2, 16), 0.25)
    steps = torch.tensor([0.0625, 0.25, 0.75])[:, None, None].expand(3, 2, 2)
    calibration = make_calibration(mean, steps)
    pages = L1Pages(LAYOUT, 4, device=torch.device(device), calibration=calibration)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(pages.kv.shape, generator=generator).to(pages.kv.dtype)
    if not codec.has_fixed_size:
        numbers[0, 1, 0, 3, 1, 2] = 1e9  # Has no code and is stored as it is.
    pages.kv[:, 1] = numbers[:, 1].to(device)
    return pages


@pytest.mark.parametrize("codec", list(KvCodec))
def test_a_page_comes_back_as_on_the_cpu(codec: KvCodec) -> None:
    found = []
    for device in ("cpu", "cuda"):
        pages = pages_on(device, codec)
        frames = None
        if not codec.has_fixed_size:
            frames = pages.read_frames(1, LEVELS.get(codec, CodecLevel.FINE))
        for layer in range(2):
            if frames is None:
                stored = pages.read_ranges(layer, [1], codec)[0]
            else:
                size = len(frames) // 2
                stored = frames[layer * size : (layer + 1) * size]
            window = pages.window(layer, [3], codec, [len(stored)])
            window.ranges[0][:] = stored
            window.commit(1)
        found.append((pages.kv[:, 3].float().cpu(), pages.kv[:, 1].float().cpu()))
    (cpu, source), (cuda, _) = found
    assert torch.equal(source, found[1][1])
    apart = (cuda - cpu).abs().max()
    assert apart == 0 if codec is KvCodec.NONE else apart < 0.5  # Half way: by one code at most.
    assert (cuda - source).abs().max() < 0.5
