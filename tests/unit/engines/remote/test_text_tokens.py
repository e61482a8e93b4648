"""Text as bytes: what goes in by the shipped tokenizer and template comes out as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tierkv.dbfront.contracts import Message
from tierkv.dbfront.tokens.chunked_prompt import encode_chat
from tierkv.dbfront.tokens.detokenizer import Detokenizer
from tierkv.dbfront.tokens.tokenizer import TextTokenizer, load_tokenizer
from tierkv.integrations.remote.text_tokens import (
    END,
    ESCAPE,
    MARK,
    NAMES,
    ROLES,
    TEMPLATE,
    VOCABULARY,
    Spoken,
    folder_here,
    messages_of,
    text_folder,
    text_of,
    tokens_of,
)
from tierkv.kvcore.errors import UdfArgumentError, UserError

TOKENIZER: TextTokenizer = load_tokenizer(text_folder())
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
TRICKY = st.lists(
    st.sampled_from([MARK, ESCAPE, "0", "1", "user", "é", *NAMES.values()]), max_size=6
).map("".join)
TALKS = st.lists(st.builds(Message, st.sampled_from(ROLES), TEXTS | TRICKY), min_size=1, max_size=5)


@given(TALKS)
async def test_a_conversation_comes_back_as_it_was(talk: list[Message]) -> None:
    ids = await TOKENIZER.encode_chat(talk)
    assert messages_of(ids) == tuple(Spoken(m.role, m.content) for m in talk)


@given(st.lists(TEXTS | TRICKY, max_size=3), TEXTS | TRICKY)
async def test_documents_can_forge_no_message(documents: list[str], text: str) -> None:
    encoded = await encode_chat(TOKENIZER, [Message("user", text)], documents)
    (spoken,) = messages_of(encoded.token_ids)
    assert spoken.role == "user"
    assert spoken.content == "".join(f"{d}\n" for d in documents) + text


@given(TEXTS)
async def test_a_raw_prompt_is_its_bytes(text: str) -> None:
    assume(not any(name in text for name in NAMES.values()))
    ids = await TOKENIZER.encode_prompt(text)
    assert ids == tokens_of(text) == tuple(text.encode())
    assert messages_of(ids) == (Spoken("", text),)


@given(TEXTS)
def test_an_answer_becomes_text_again_byte_by_byte(text: str) -> None:
    stream = Detokenizer(TOKENIZER.decode)
    assert "".join(stream.push((token,)) for token in tokens_of(text)) + stream.flush() == text


def test_the_shipped_files_are_those_of_the_code() -> None:
    known = TOKENIZER.tokenizer
    assert known.get_vocab_size(with_added_tokens=True) == VOCABULARY
    assert {known.token_to_id(name): name for name in NAMES.values()} == NAMES
    assert TOKENIZER.template.source == TEMPLATE
    assert TOKENIZER.decode((END,)) == ""


def test_the_files_are_found_wherever_tierkv_is_installed() -> None:
    elsewhere = "/opt/other/site-packages/tierkv/integrations/remote/text_model"
    assert folder_here(elsewhere) == folder_here(str(text_folder())) == text_folder()
    assert folder_here("/models/remote/text_model") == Path("/models/remote/text_model")


def test_half_characters_and_other_ids() -> None:
    assert text_of((0xC3,)) == "\ufffd"
    assert tokens_of("a\ud800") == tokens_of("a\ufffd")
    with pytest.raises(UserError, match="token ids must be in"):
        messages_of((VOCABULARY,))


async def test_a_role_nobody_knows_is_refused() -> None:
    with pytest.raises(UdfArgumentError, match="no role critic"):
        await TOKENIZER.encode_chat([Message("critic", "no")])
