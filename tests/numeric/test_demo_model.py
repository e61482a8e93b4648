"""Tests of the shipped weights: they load, fit the size limit and answer held-out questions."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tierkv.compute.demo_model import data  # noqa: E402
from tools.demo_model.evaluate import Answerer, exact_match  # noqa: E402
from tools.demo_model.tokenizer import FOLDER  # noqa: E402


@pytest.fixture(scope="module")
def answerer() -> Answerer:
    torch.set_num_threads(1)
    return Answerer(Path(FOLDER))


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 8_000_000


def test_configuration_is_a_tied_llama(answerer: Answerer) -> None:
    config = answerer.model.config
    assert config.model_type == "llama"
    assert config.tie_word_embeddings
    assert config.max_position_embeddings >= 4096
    assert config.eos_token_id == answerer.tokenizer.eos_token_id


def test_history_has_the_tokens_that_were_generated(answerer: Answerer) -> None:
    tokenizer = answerer.tokenizer
    chat = [{"role": "user", "content": "Customer: Vito Adams. City: Oslo.\nQuestion: City?"}]
    start = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(
        [*chat, {"role": "assistant", "content": "Oslo"}], tokenize=False
    )
    ids = tokenizer.encode(start, add_special_tokens=False)
    longer = tokenizer.encode(whole, add_special_tokens=False)
    assert longer[: len(ids)] == ids
    assert tokenizer.decode(longer[len(ids) :], skip_special_tokens=True) == "Oslo"
    value = tokenizer.encode(" Oslo", add_special_tokens=False)
    assert longer[len(ids) : -1] == value
    assert value[0] in ids


def test_one_document_tasks_are_learnt(answerer: Answerer) -> None:
    scores = exact_match(answerer, data.make_probes(data.SINGLE_TASKS, 20, seed=11))
    assert set(scores) == set(data.SINGLE_TASKS)
    assert min(scores.values()) >= 0.85, scores


def test_long_prompt_does_not_break(answerer: Answerer) -> None:
    records = data.make_records(14, 21)
    body = "\n".join([data.INSTRUCTION, *(record.text for record in records)])
    chat = [{"role": "user", "content": f"{body}\nQuestion: Where does {records[0].name} live?"}]
    answer = answerer.answer([chat])[0]
    assert answer.isalpha()
