"""Prompts in parts: text, ids and the ranges of chunks, with several kinds of tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.fix_text import CHAT_TEMPLATE, write_model_folder
from tierkv import compute
from tierkv.dbfront.contracts import Message
from tierkv.dbfront.tokens.chunked_prompt import (
    EncodedPrompt,
    PromptPart,
    clean_documents,
    encode_chat,
    encode_text,
    prompt_parts,
)
from tierkv.dbfront.tokens.tokenizer import TextTokenizer, load_tokenizer
from tierkv.kvcore import limits
from tierkv.kvcore.errors import ContextTooLongError, UdfArgumentError

DEMO = Path(compute.__file__).parent / "demo_model" / "weights"
DOCUMENTS = ("Customer: Mia. City: Porto.", "Das Wetter in Köln ist schön.\n\nUnd nass.")
QUESTION = "Question: Where does Mia live?"
CORPUS = [*DOCUMENTS, QUESTION, "user assistant system"] * 4


def byte_level(folder: Path) -> Path:
    return write_model_folder(folder)


def llama_like(folder: Path) -> Path:
    """SentencePiece as Llama 2 has it: a space before whatever looks like a beginning."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=tokens)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return written(tokenizer, folder)


def qwen_like(folder: Path) -> Path:
    """Byte-level BPE that merges across line ends where one text would stand behind another."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return written(tokenizer, folder)


def written(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def shipped(folder: Path) -> Path:
    return DEMO


@pytest.fixture(params=[byte_level, llama_like, qwen_like, shipped], ids=lambda kind: kind.__name__)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> TextTokenizer:
    return load_tokenizer(request.param(tmp_path))


def text_of(tokenizer: TextTokenizer, ids: tuple[int, ...]) -> str:
    text: str = tokenizer.tokenizer.decode(list(ids), skip_special_tokens=False)
    return text


def chunk_ids(encoded: EncodedPrompt) -> list[tuple[int, ...]]:
    return [encoded.token_ids[start:stop] for start, stop in encoded.chunks]


async def test_a_chat_with_documents_reads_as_rendered(tokenizer: TextTokenizer) -> None:
    messages = [Message("system", "Be brief."), Message("user", QUESTION)]
    encoded = await encode_chat(tokenizer, messages, DOCUMENTS)
    content = f"{DOCUMENTS[0]}\n{DOCUMENTS[1]}\n{QUESTION}"
    whole = await tokenizer.encode_chat([messages[0], Message("user", content)])
    assert text_of(tokenizer, encoded.token_ids) == text_of(tokenizer, whole)
    assert len(encoded.chunks) == 2
    assert encoded.chunks[0][1] == encoded.chunks[1][0]


async def test_a_document_has_the_same_ids_at_any_position(tokenizer: TextTokenizer) -> None:
    ask = [Message("user", QUESTION)]
    alone = chunk_ids(await encode_chat(tokenizer, ask, DOCUMENTS[:1]))
    swapped = chunk_ids(await encode_chat(tokenizer, ask, DOCUMENTS[::-1]))
    raw = chunk_ids(await encode_text(tokenizer, "Go.", DOCUMENTS))
    marked = [Message("user", f"Read:|{DOCUMENTS[0]}\n|{QUESTION}")]
    cut = chunk_ids(await encode_chat(tokenizer, marked, separator="|"))
    assert alone[0] == swapped[1] == raw[0] == cut[0]


async def test_a_raw_prompt_with_documents_keeps_its_special_tokens(
    tokenizer: TextTokenizer,
) -> None:
    plain = await encode_text(tokenizer, "a")
    assert plain.token_ids == await tokenizer.encode_prompt("a")
    assert plain.chunks == ()
    encoded = await encode_text(tokenizer, QUESTION, DOCUMENTS)
    specials = (await tokenizer.encode_prompt("a"))[: -len(tokenizer.tokenizer.encode(
        "a", add_special_tokens=False).ids)]  # fmt: skip
    assert encoded.token_ids[: encoded.chunks[0][0]] == specials
    own = encoded.token_ids[len(specials) :]
    assert text_of(tokenizer, own) == f"{DOCUMENTS[0]}\n{DOCUMENTS[1]}\n{QUESTION}"


async def test_only_the_first_user_message_has_documents(tokenizer: TextTokenizer) -> None:
    first = [Message("user", "Who?")]
    later = [*first, Message("assistant", "Mia."), Message("user", "Where?")]
    short = await encode_chat(tokenizer, first, DOCUMENTS)
    long = await encode_chat(tokenizer, later, DOCUMENTS)
    assert long.chunks == short.chunks
    end = short.chunks[-1][1]
    assert long.token_ids[:end] == short.token_ids[:end]


async def test_without_chunks_ids_are_those_of_the_plain_prompt(tokenizer: TextTokenizer) -> None:
    messages = [Message("user", QUESTION)]
    plain = await tokenizer.encode_chat(messages)
    assert await encode_chat(tokenizer, messages, separator="###") == EncodedPrompt(plain)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | replace('Mia', 'Ann') }}{% endfor %}",
        "nothing of it",
    ],
)
async def test_a_template_that_changes_documents_gets_no_chunks(
    tmp_path: Path, template: str
) -> None:
    tokenizer = load_tokenizer(write_model_folder(tmp_path, chat_template=template))
    encoded = await encode_chat(tokenizer, [Message("user", QUESTION)], DOCUMENTS)
    whole = Message("user", f"{DOCUMENTS[0]}\n{DOCUMENTS[1]}\n{QUESTION}")
    assert encoded == EncodedPrompt(await tokenizer.encode_chat([whole]))


async def test_a_prompt_that_holds_the_mark_is_no_trouble(tokenizer: TextTokenizer) -> None:
    messages = [Message("user", "tierkv-documents-0 tierkv-documents-1")]
    encoded = await encode_chat(tokenizer, messages, ("tierkv-documents-2",))
    assert len(encoded.chunks) == 1
    assert text_of(tokenizer, chunk_ids(encoded)[0]).strip() == "tierkv-documents-2"


def test_parts_of_a_prompt() -> None:
    assert prompt_parts((), "a") == (PromptPart("a"),)
    assert prompt_parts(("d",), "") == (PromptPart("d\n", True),)
    assert prompt_parts(("d",), "h#c##t", "#") == (
        PromptPart("d\n", True),
        PromptPart("h"),
        PromptPart("c", True),
        PromptPart("t"),
    )
    assert prompt_parts((), "h#t", "#") == (PromptPart("h"), PromptPart("t"))
    assert prompt_parts((), "#c#", "#") == (PromptPart("c", True),)


def test_documents_are_cleaned() -> None:
    assert clean_documents(None) == ()
    assert clean_documents([" a\n", None, "", "  ", "b"]) == ("a", "b")
    with pytest.raises(UdfArgumentError, match="1025 documents"):
        clean_documents(["x"] * (limits.MAX_CHUNKS + 1))


async def test_what_can_not_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(write_model_folder(tmp_path))
    with pytest.raises(UdfArgumentError, match="need a user message"):
        await encode_chat(tokenizer, [Message("system", "s")], ("d",))
    with pytest.raises(UdfArgumentError, match="at most 1024"):
        await encode_text(tokenizer, "x|" * 2000, (), "|")
    monkeypatch.setattr(limits, "MAX_PROMPT_CHARS", 10)
    with pytest.raises(ContextTooLongError):
        await encode_chat(tokenizer, [Message("user", "abc")], ("x" * 9,))
    with pytest.raises(ContextTooLongError):
        await encode_text(tokenizer, "abc", ("x" * 9,))


async def test_long_documents_go_to_a_thread(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model_folder(tmp_path))
    encoded = await encode_text(tokenizer, "Go.", ("word " * 10_000,))
    assert encoded.chunks == ((1, 50_002),)
