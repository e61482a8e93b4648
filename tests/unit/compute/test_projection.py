"""Matrices in the processor's own order give the products of plain ones."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from tests.fix_model import tiny_config
from tierkv.compute.model.architecture import parse_architecture
from tierkv.compute.model.weights import Projection, is_packed, random_weights

torch.set_num_threads(1)
CPU = torch.device("cpu")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(96, 64), (1024, 768), (33, 16411)])
def test_any_number_of_tokens_gives_the_plain_product(shape, biased) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    bias = torch.randn(shape[0], generator=generator) if biased else None
    projection = Projection(weight, bias)
    assert projection.parameters == weight.numel() + (shape[0] if biased else 0)
    with torch.inference_mode():
        for tokens in (0, 1, 2, 7, 64, 333):
            x = torch.randn(tokens, shape[1], generator=generator)
            # float32; the order of additions differs.
            torch.testing.assert_close(projection(x), linear(x, weight, bias), rtol=1e-5, atol=2e-5)
            split = torch.randn(tokens, 2 * shape[1], generator=generator)[:, shape[1] :]
            torch.testing.assert_close(
                projection(split), linear(split, weight, bias), rtol=1e-5, atol=2e-5
            )


def test_small_matrices_and_other_types_stay_as_they_are() -> None:
    assert not is_packed((64, 64), torch.float32, CPU)
    assert not is_packed((4096, 4096), torch.bfloat16, CPU)
    assert not is_packed((4096, 4096), torch.float32, torch.device("meta"))


def test_a_tied_head_counts_once() -> None:
    tied = parse_architecture(tiny_config("llama", tie_word_embeddings=True))
    loose = parse_architecture(tiny_config("llama"))
    counts = [
        random_weights(arch, seed=1, dtype=torch.float32, device=CPU).parameters()
        for arch in (tied, loose)
    ]
    assert counts[1] - counts[0] == 128 * 64
