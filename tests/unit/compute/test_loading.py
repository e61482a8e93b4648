"""What can't be loaded is refused before anything is reserved, with the numbers that matter."""

from __future__ import annotations

import pytest

from tests.fix_model import node_config, tiny_config
from tierkv.compute.config import RandomModelSpec
from tierkv.compute.loading import load_model
from tierkv.compute.model_plan import free_host_bytes, weights_bytes
from tierkv.kvcore.errors import ConfigError

PAGE_BYTES = 3 * 2 * 8 * 2 * 16 * 4


def test_too_little_memory_for_l1_says_how_much_was_needed() -> None:
    pages = (1 << 60) // PAGE_BYTES
    with pytest.raises(ConfigError, match=f"{pages * PAGE_BYTES} for {pages} pages") as refused:
        load_model(node_config(l1_pages=0, l1_bytes=1 << 60))
    assert "l1_capacity" in str(refused.value.hint)


def test_too_little_memory_for_the_weights_says_how_much_was_needed() -> None:
    config = tiny_config(vocab_size=1 << 50, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"\d{18} for weights") as refused:
        load_model(node_config(random_model=RandomModelSpec(config)))
    assert "smaller model" in str(refused.value.hint)


def test_a_capacity_below_two_pages_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"l1_capacity of 100 bytes holds 0 pages") as no:
        load_model(node_config(l1_pages=0, l1_bytes=100))
    assert str(2 * PAGE_BYTES) in str(no.value.hint)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_size_of_weights_is_known_before_they_are_there(family) -> None:
    config = node_config(random_model=RandomModelSpec(tiny_config(family)), dtype="bfloat16")
    model = load_model(config)
    layout = model.info.layout
    assert weights_bytes(model.decoder.arch, layout) == 2 * model.info.parameters
    assert free_host_bytes() != 0
