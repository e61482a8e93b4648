"""The correctness gate: passes models that blend rightly, names what is wrong with others."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

from tests.fix_blend import DOCS, doc_request
from tests.fix_logits import CASES, CPU, LINEAR, Pair
from tests.fix_model import answer, node_config, running_node
from tierkv.compute.blend.gate import check_model
from tierkv.compute.config import LoadPolicy
from tierkv.compute.loading import load_model
from tierkv.compute.model.architecture import parse_architecture
from tierkv.compute.model.decoder import Decoder
from tierkv.compute.model.pages import L1Pages
from tierkv.compute.model.weights import random_weights
from tierkv.compute.tiers.load_figures import BLEND_PROBE_REFUSALS
from tierkv.kvcore.ids import new_request_id
from tierkv.kvcore.layout import BlockLayout, KvDtype

torch.set_num_threads(1)


def make_decoder(kind=Decoder, case="llama", dtype=KvDtype.FLOAT32) -> Decoder:
    arch = parse_architecture(CASES[case])
    weights = random_weights(arch, seed=1, dtype=getattr(torch, dtype), device=CPU)
    layout = BlockLayout(arch.layers, arch.kv_heads, arch.head_dim, dtype, 64)
    return kind(arch, weights, L1Pages(layout, 2, device=CPU))


@pytest.mark.parametrize("dtype", KvDtype)
@pytest.mark.parametrize("case", sorted(CASES))
def test_supported_families_pass(case, dtype) -> None:
    decoder = make_decoder(case=case, dtype=dtype)
    assert check_model(decoder) == ""
    assert not decoder.pages.kv.any()  # The node's own pages stay as they were.


class KeepsRotatedKeys(Decoder):
    """Keeps chunks' keys as they are after rope: at their next place they are rotated twice."""

    def layer_steps(self, batch):
        logits = yield from super().layer_steps(batch)
        if batch.raw is not None:
            rows = batch.write_rows[
                torch.cat((batch.raw.source_rows, batch.raw.source_rows + len(batch.token_ids)))
            ]
            for layer in range(self.arch.layers):
                table = self.pages.token_rows(layer)
                table[batch.raw.target_rows] = table[rows]
        return logits


class TurnsOtherwise(Decoder):
    """Its own passes use other frequencies than it tells blending."""

    def layer_steps(self, batch):
        told, self.frequencies = self.frequencies, self.frequencies * 0.8
        logits = yield from super().layer_steps(batch)
        self.frequencies = told
        return logits


@pytest.mark.parametrize("dtype", [KvDtype.FLOAT32, KvDtype.BFLOAT16])
@pytest.mark.parametrize("kind", [KeepsRotatedKeys, TurnsOtherwise])
def test_wrong_rotation_is_refused(kind, dtype) -> None:
    reason = check_model(make_decoder(kind, dtype=dtype))
    assert "differ" in reason


def test_keys_rotated_twice_are_found_in_layer_zero() -> None:
    assert "layer 0" in check_model(make_decoder(KeepsRotatedKeys))


def test_logits_that_are_not_finite_are_refused() -> None:
    decoder = make_decoder()
    broken = dataclasses.replace(
        decoder.weights, final_norm=torch.full_like(decoder.weights.final_norm, torch.nan)
    )
    decoder = Decoder(decoder.arch, broken, decoder.pages)
    assert "not finite" in check_model(decoder)


def test_loading_a_model_runs_the_gate() -> None:
    loaded = load_model(node_config())
    assert loaded.info.blend_refusal == ""
    assert not loaded.decoder.pages.kv.any()


def test_a_model_that_fails_is_served_and_says_why(tmp_path) -> None:
    pair = Pair(CASES["llama"], tmp_path)
    pair.theirs.model.norm.weight.data.fill_(torch.nan)
    pair.theirs.save_pretrained(tmp_path)
    loaded = load_model(node_config(random_model=None, model_folder=str(tmp_path)))
    assert "not finite" in loaded.info.blend_refusal


def test_stretched_rope_passes() -> None:
    assert LINEAR["factor"] == 4.0
    assert check_model(make_decoder(case="linear-rope")) == ""


async def test_one_of_many_prompts_not_worth_a_pass_still_asks_for_its_chunks(monkeypatch) -> None:
    """Else passes would never be tried again after the costs have changed."""
    async with running_node(load_policy=LoadPolicy.AUTO) as node:
        engine = node._engine
        credits: list[float] = []
        monkeypatch.setattr(engine.tiers.decider, "chunk_credit", lambda *work, **facts: 0.0)
        monkeypatch.setattr(
            engine.isolation, "want", lambda request, chunk, credit: credits.append(credit)
        )
        asked = doc_request(DOCS[:2])
        for _ in range(BLEND_PROBE_REFUSALS):
            await node.drop_cache()
            await answer(node, replace(asked, request_id=new_request_id()))
        assert set(credits) == {1.0} and len(credits) == 2, credits
