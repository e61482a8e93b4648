"""The shipped model answers as well with KV that went through a codec; without one, the same."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from bench.codec_quality import MEASURED, Quality, measure  # noqa: E402
from tierkv.compute.demo_model.data import SINGLE_TASKS, make_probes  # noqa: E402
from tierkv.kvcore.layout import KvCodec  # noqa: E402
from tools.demo_model.tokenizer import FOLDER  # noqa: E402


@pytest.fixture(scope="module")
def found() -> dict[str, Quality]:
    torch.set_num_threads(1)
    return measure(FOLDER, make_probes(SINGLE_TASKS, 6, seed=11))


def test_none_equals_full_recompute(found: dict[str, Quality]) -> None:
    none, full = found["none"], found["full"]
    assert none.agreement == 1.0 and none.kl_max < 1e-9
    assert none.exact_match == full.exact_match >= 0.85
    assert none.reused_share > 0.8


@pytest.mark.parametrize("codec", [codec for codec in MEASURED if codec.is_lossy])
def test_lossy_codecs_stay_near_it(found: dict[str, Quality], codec: KvCodec) -> None:
    quality = found[str(codec)]
    assert quality.exact_match >= found["full"].exact_match - 0.05
    assert quality.agreement >= 0.95
    assert 0 < quality.kl_mean <= 0.01


def test_coarser_codecs_are_farther_away(found: dict[str, Quality]) -> None:
    assert found["int8"].kl_mean < found["fp8"].kl_mean < found["int4"].kl_mean
    fine, medium, coarse = (found[f"entropy-{name}"] for name in ("fine", "medium", "coarse"))
    assert fine.kl_mean < medium.kl_mean < coarse.kl_mean
    assert 32 > fine.bits > medium.bits > coarse.bits > 0


def test_entropy_coding_is_smaller_at_the_same_loss(found: dict[str, Quality]) -> None:
    assert found["entropy-medium"].bits < found["int4"].bits
    assert found["entropy-medium"].kl_mean < found["int4"].kl_mean
