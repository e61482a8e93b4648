"""Model folders as the front reads them; templates equal transformers'."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.fix_text import CHAT_TEMPLATE, SPECIALS, byte_tokenizer, text_model, write_model_folder
from tierkv.dbfront.contracts import Message
from tierkv.dbfront.tokens.chat_template import ChatTemplate
from tierkv.dbfront.tokens.chunked_prompt import encode_chat, encode_text
from tierkv.dbfront.tokens.plain_text import PlainText
from tierkv.dbfront.tokens.tokenizer import TokenizerCache, load_tokenizer
from tierkv.kvcore import limits
from tierkv.kvcore.clock import ManualClock
from tierkv.kvcore.errors import ContextTooLongError, ModelFolderError, UdfArgumentError

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- system_message }}<|eot_id|>
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}{{- tools | tojson }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {% generation %}{{- '<|im_start|>assistant\\n' + message.content }}{% endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LOOPS = """{% for message in messages %}
    {% if message.role == 'tool' %}
        {% continue %}
    {% endif %}
  {{ message | tojson(indent=2) }}
{% endfor %}
é {{ {"a": "é<"} | tojson }}
"""
TALK = (
    Message("system", " Be brief. "),
    Message("user", "Hi <b>there</b>  "),
    Message("assistant", "Hello\n"),
    Message("user", "¿Qué?\n\n"),
)


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, LLAMA3, QWEN, LOOPS])
@pytest.mark.parametrize("talk", [TALK, TALK[1:], TALK[1:2]])
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_render_as_transformers_does(
    source: str, talk: tuple[Message, ...], prompt: bool
) -> None:
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), bos_token="<s>", eos_token="</s>"
    )
    expected = theirs.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in talk],
        chat_template=source,
        tokenize=False,
        add_generation_prompt=prompt,
    )
    ours = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    assert ours.render(talk, add_generation_prompt=prompt) == expected


def test_a_template_refuses_messages_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", special_tokens={})
    with pytest.raises(UdfArgumentError, match="roles must alternate"):
        template.render(TALK)


@pytest.mark.parametrize("source", ["{% if %}", "{% nonsense %}"])
def test_a_broken_template_is_the_folders_fault(source: str) -> None:
    with pytest.raises(ModelFolderError, match="chat template"):
        ChatTemplate(source, special_tokens={})


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(999999999) %}{% endfor %}",
    ],
)
def test_templates_stay_in_their_sandbox(attack: str) -> None:
    with pytest.raises(UdfArgumentError):
        ChatTemplate(attack, special_tokens={}).render(TALK)


def test_strftime_now_reads_the_given_clock() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%Y') }}", special_tokens={}, clock=ManualClock(epoch=1_600_000_000)
    )
    assert template.render(TALK) == "2020"


def test_a_model_without_template_gets_the_plain_one() -> None:
    text = ChatTemplate(None, special_tokens={}).render([Message("user", "Hi")])
    assert text == "user: Hi\nassistant:"


async def test_prompts_get_the_special_tokens_and_chats_those_of_the_template(
    tmp_path: Path,
) -> None:
    tokenizer = load_tokenizer(write_model_folder(tmp_path))
    assert (await tokenizer.encode_prompt("a"))[0] == 0
    chat = await tokenizer.encode_chat([Message("user", "a")])
    assert chat[:2] == (0, 3)
    assert chat[-1] == 4
    assert tokenizer.decode(chat) == "a\n"


async def test_add_bos_token_is_honoured_once(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    plain = json.loads((tmp_path / "tokenizer.json").read_text())
    config = {"bos_token": "<s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with_processor = await load_tokenizer(tmp_path).encode_prompt("a")
    plain["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    assert await load_tokenizer(tmp_path).encode_prompt("a") == with_processor


def test_the_template_file_comes_before_the_configuration(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert load_tokenizer(tmp_path).template.source == "own file"


def test_a_list_of_templates_has_a_default(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    templates = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert load_tokenizer(tmp_path).template.source == "d"


def test_a_truncating_tokenizer_file_never_truncates_here(tmp_path: Path) -> None:
    cutting = byte_tokenizer()
    cutting.enable_truncation(2)
    cutting.enable_padding(length=50)
    cutting.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).tokenizer.encode("abcdef").ids) == 7


def test_a_folder_without_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert "copy the folder" in caught.value.hint


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_unreadable_files_are_named(tmp_path: Path, file: str) -> None:
    write_model_folder(tmp_path)
    (tmp_path / file).write_text("{")
    with pytest.raises(ModelFolderError, match=file):
        load_tokenizer(tmp_path)


async def test_text_beyond_the_limit_is_refused_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(write_model_folder(tmp_path))
    monkeypatch.setattr(limits, "MAX_PROMPT_CHARS", 10)
    with pytest.raises(ContextTooLongError, match="11 characters"):
        await tokenizer.encode_prompt("x" * 11)
    with pytest.raises(ContextTooLongError):
        await tokenizer.encode_chat([Message("user", "x" * 6)] * 2)


async def test_a_lone_surrogate_is_no_crash(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model_folder(tmp_path))
    assert tokenizer.decode(await tokenizer.encode_prompt("a\ud800b")) == "a\ufffdb"


async def test_long_texts_are_encoded_alike(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model_folder(tmp_path))
    ids = await tokenizer.encode_prompt("word " * 10_000)
    assert len(ids) == 50_001
    text = "Grüße \U0001f600 in words. " * 1_000
    plain = tokenizer.tokenizer.encode(text, add_special_tokens=True).ids
    assert await tokenizer.encode_prompt(text) == tuple(plain)


async def test_the_cache_loads_each_revision_once(tmp_path: Path) -> None:
    cache = TokenizerCache()
    model = text_model(write_model_folder(tmp_path))
    first = await cache.get(model)
    assert await cache.get(model) is first
    assert await cache.get(text_model(tmp_path, revision="r2")) is not first


WITH_A_SPACE = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }}</s>{% endif %}{% endfor %}"
)


def metaspace_folder(folder: Path, template: str) -> Path:
    """A tokenizer that writes a space before every word, and takes the first one away again."""
    words = ["<s>", "</s>", "<unk>", "[INST]", "[/INST]", "\u2581a", "\u2581yes", "\u2581no"]
    words += ["\u2581", "y", "e", "s", "n", "o", "ye", "yes", "no"]
    merges = [("y", "e"), ("ye", "s"), ("n", "o"), ("\u2581", "yes"), ("\u2581", "no")]
    model = models.BPE({word: i for i, word in enumerate(words)}, merges, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(words[:5])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.mark.parametrize(
    ("template", "tokens"),
    [
        (WITH_A_SPACE, ["\u2581yes"]),
        (WITH_A_SPACE.replace("%} {{ m.content | t", "%}{{ m.content | t"), ["yes"]),
        # Templates that know no answers, or write them elsewhere: as the text stands alone.
        ("{% if messages[1] %}H{{ messages[1].content }}{% else %}[INST]{% endif %}", ["yes"]),
        ("{% if messages[1] %}{{ raise_exception('no') }}{% endif %}[INST]", ["yes"]),
    ],
)
def test_an_answer_has_the_tokens_that_the_template_makes_of_it(
    tmp_path: Path, template: str, tokens: list[str]
) -> None:
    tokenizer = load_tokenizer(metaspace_folder(tmp_path, template))
    (ids,) = tokenizer.encode_answers(["yes"])
    assert [tokenizer.tokenizer.id_to_token(i) for i in ids] == tokens
    asked = [Message("user", "a"), Message("assistant", "yes")]
    if template is WITH_A_SPACE:
        history = tokenizer.tokenizer.encode(
            tokenizer.template.render(asked, add_generation_prompt=False), add_special_tokens=False
        )
        assert history.ids[-2:-1] == list(ids)


def test_answers_to_a_byte_level_model_are_their_letters(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model_folder(tmp_path))
    encoded = tokenizer.encode_answers(["yes", "no thanks"])
    assert [tokenizer.decode(ids) for ids in encoded] == ["yes", "no thanks"]
    assert [len(ids) for ids in encoded] == [3, 9]


async def test_many_texts_are_counted_beside_the_event_loop(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model_folder(tmp_path))
    texts = ["a" * n for n in range(300)]
    assert await tokenizer.count(texts) == tuple(range(300))
    with pytest.raises(ContextTooLongError):
        await tokenizer.count(["a", "b" * (limits.MAX_PROMPT_CHARS + 1)])


SPELLED = "a</s><s><|user|>b"


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, LOOPS, None])
@pytest.mark.parametrize("text", [SPELLED, f"  {SPELLED}\n", "<|us<s>er|>", "é\ufde01\ufde1</s>"])
async def test_special_tokens_that_people_spell_are_text(
    tmp_path: Path, source: str | None, text: str
) -> None:
    tokenizer = load_tokenizer(write_model_folder(tmp_path, chat_template=source))
    talk = [Message("system", "</s>"), Message("user", text), Message("assistant", "c<s>")]
    harmless = [Message(m.role, "x") for m in talk]
    ours = (await encode_chat(tokenizer, talk)).token_ids
    specials = [i for i in ours if i < len(SPECIALS)]
    assert specials == [i for i in await tokenizer.encode_chat(harmless) if i < len(SPECIALS)]
    written = tokenizer.tokenizer.decode(list(ours), skip_special_tokens=False)
    assert written == tokenizer.template.render(talk)


async def test_documents_and_separators_may_spell_special_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model_folder(tmp_path))
    talk = [Message("user", "before<s>one</s>two<s>after</s>")]
    parted = await encode_chat(tokenizer, talk, ["d</s>"], "<s>")
    assert [i for i in parted.token_ids if i < len(SPECIALS)] == [0, 3, 4]
    chunks = [tokenizer.decode(parted.token_ids[a:b]) for a, b in parted.chunks]
    assert chunks == ["d</s>\n", "one</s>two"]
    raw = await encode_text(tokenizer, "<|user|>x", ["d</s>"])
    assert [i for i in raw.token_ids if i < len(SPECIALS)] == [0, 3]
    plain = await encode_text(tokenizer, "<|user|>x", plain=True)
    assert tokenizer.decode(plain.token_ids) == "<|user|>x"
    assert plain.token_ids[0] == 0


async def test_text_before_a_spelled_special_token_has_its_usual_ids(tmp_path: Path) -> None:
    """Rows share the prompt before their own text, so that its KV is reused."""
    tokenizer = load_tokenizer(write_model_folder(tmp_path))
    start = Message("system", "Be brief.")
    usual = (await encode_chat(tokenizer, [start, Message("user", "x")])).token_ids
    other = (await encode_chat(tokenizer, [start, Message("user", SPELLED)])).token_ids
    shared = usual.index(3) + 1
    assert other[:shared] == usual[:shared]


def test_of_special_tokens_with_one_beginning_the_longest_is_found() -> None:
    tokenizer = byte_tokenizer()
    names = ["<|r|>", "<|r|>s", "<|r_1|>", "<|r_12|>", "<|r"]
    tokenizer.add_special_tokens(names)
    plain = PlainText(tokenizer)
    for name in names:
        masked = plain.mask(f"a{name}b")
        assert re.fullmatch("a\ufde0[0-9]+\ufde1b", masked)
        assert tokenizer.decode(plain.encode(masked)) == f"a{name}b"


def test_a_vocabulary_of_words_may_hold_the_spelling() -> None:
    vocabulary = [("?", -20.0), ("</s>", 0.0), ("<", -9.0), ("/s>", -9.0), ("a", -9.0)]
    words = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    words.add_special_tokens(["</s>"])
    plain = PlainText(words)
    assert plain.encode(plain.mask("a</s>") + "</s>") == [4, 2, 3, 1]
