"""Blending the shipped model's notes: the more is computed again, the nearer to full recompute."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from bench.blend_quality import NOTHING, Measured, Way, measure  # noqa: E402
from bench.quality import blend_panels  # noqa: E402
from bench.quality_table import blend_table, methods, points  # noqa: E402
from tierkv.kvcore.request import BlendSelector  # noqa: E402
from tools.demo_model.tokenizer import FOLDER  # noqa: E402

RATIOS = (NOTHING, 0.15, 0.3, 0.5, 1.0)


@pytest.fixture(scope="module")
def found() -> Measured:
    torch.set_num_threads(1)
    tried = [Way("as it lies", 0.0, None)]
    tried += [Way(str(s), ratio, s) for s in BlendSelector for ratio in RATIOS]
    tried += [Way("gradual", ratio, BlendSelector.HKVD, gradual=True) for ratio in RATIOS]
    return measure(FOLDER, ["cross_document"], tried, count=24, seed=5)


def quality(found: Measured, name: str, ratio: float):
    return next(q for way, q in found.by_way.items() if (way.name, way.ratio) == (name, ratio))


@pytest.mark.parametrize("name", [*BlendSelector, "gradual"])
def test_all_computed_again_is_the_full_recompute(found: Measured, name: str) -> None:
    exact = quality(found, name, 1.0)
    assert exact.agreement == 1.0 and exact.kl_max < 1e-6
    assert found.full.exact_match >= 0.9


@pytest.mark.parametrize("name", ["hkvd", "query", "gradual"])
def test_divergence_falls_with_the_share_computed_again(found: Measured, name: str) -> None:
    kl = [quality(found, name, ratio).kl_mean for ratio in RATIOS]
    assert kl == sorted(kl, reverse=True)
    assert kl[0] > 0.5 and kl[3] < 0.05 * kl[0]


def test_reusing_everything_loses_what_stands_between_notes(found: Measured) -> None:
    assert quality(found, "boundary", NOTHING).exact_match <= found.full.exact_match - 0.2
    assert quality(found, "as it lies", 0.0).exact_match <= found.full.exact_match - 0.2


def test_seeing_selectors_beat_the_blind_one(found: Measured) -> None:
    blind = quality(found, "boundary", 0.3).agreement
    for name in ("hkvd", "query", "gradual"):
        assert quality(found, name, 0.3).agreement >= blind + 0.15
    assert quality(found, "query", 0.15).agreement >= 0.85


def test_table_and_picture_show_every_method(found: Measured) -> None:
    table, panels = blend_table(found), blend_panels(found)
    assert methods(found) == [*BlendSelector, "gradual"]
    assert [list(panel.lines) for panel in panels] == [methods(found)] * 2
    for name in methods(found):
        assert f"| {name} |" in table
        assert [ratio for ratio, _ in points(found, name)] == sorted(RATIOS)
        assert [ratio for ratio, _ in panels[0].lines[name]] == sorted(RATIOS)
    assert "| all reused, as it lies |" in table
