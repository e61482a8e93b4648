"""Whatever the documents: their ranges hold exactly them, and the text is the prompt's."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fix_scheduler import NAMESPACE, make_model
from tests.fix_text import text_call
from tierkv import compute
from tierkv.dbfront.contracts import Message
from tierkv.dbfront.generation.call_checks import blend_of
from tierkv.dbfront.tokens.chunked_prompt import (
    DOCUMENT_END,
    clean_documents,
    encode_chat,
    encode_text,
)
from tierkv.dbfront.tokens.tokenizer import TextTokenizer, load_tokenizer
from tierkv.kvcore.request import ReusePolicy
from tierkv.metaserver.client import NamespaceGrant

DEMO = Path(compute.__file__).parent / "demo_model" / "weights"
SPECIALS = ["<q>", "<a>", "</s>", "<sep>"]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["\n", "  x ", *SPECIALS, "Customer: Mia Brandt.", "tierkv-documents-0"]
)
QUESTION = TEXT.map(lambda text: text + "?")


@cache
def tokenizer() -> TextTokenizer:
    return load_tokenizer(DEMO)


def text_of(ids: tuple[int, ...]) -> str:
    text: str = tokenizer().tokenizer.decode(list(ids), skip_special_tokens=False)
    return text


def decodes(text: str) -> str:
    """What decoding gives for ids of a text alone; the decoder drops a space at the beginning."""
    return text_of(tuple(tokenizer().tokenizer.encode(text, add_special_tokens=False).ids))


@settings(max_examples=150, deadline=None)
@given(documents=st.lists(TEXT, max_size=4), question=QUESTION, system=TEXT)
async def test_chunks_of_a_chat_are_its_documents(
    documents: list[str], question: str, system: str
) -> None:
    kept = clean_documents(documents)
    messages = [Message("system", system), Message("user", question)]
    encoded = await encode_chat(tokenizer(), messages, kept)
    content = "".join(document + DOCUMENT_END for document in kept) + question
    rendered = tokenizer().template.render([messages[0], Message("user", content)])
    assert text_of(encoded.token_ids) == decodes(rendered)
    assert [text_of(encoded.token_ids[a:b]) for a, b in encoded.chunks] == [
        decodes(document + DOCUMENT_END) for document in kept
    ]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(encoded.chunks))


@settings(max_examples=100, deadline=None)
@given(documents=st.lists(TEXT, max_size=4), prompt=QUESTION, separator=st.sampled_from(["", "#"]))
async def test_ids_of_a_raw_prompt_do_not_depend_on_the_policy(
    documents: list[str], prompt: str, separator: str
) -> None:
    kept = clean_documents(documents)
    encoded = await encode_text(tokenizer(), prompt, kept, separator)
    call = text_call(prompt=prompt, documents=kept, chunk_separator=separator)
    for policy in (ReusePolicy(), ReusePolicy(blend=True, recompute_ratio=1.0)):
        grant = NamespaceGrant(NAMESPACE, "default", True, policy)
        blend = blend_of(call, encoded.chunks, grant, make_model())
        assert (blend is not None) == (policy.blend and bool(encoded.chunks))
        assert blend is None or blend.chunks == encoded.chunks
