"""Answers held to a JSON schema: always valid, and the same whoever computes them and when."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fix_blend import all_given_back
from tests.fix_model import answer, make_request, running_node, tiny_config
from tests.fix_pool import MemoryPoolNode
from tests.fix_text import write_model_folder
from tierkv.compute.config import LoadPolicy, RandomModelSpec
from tierkv.compute.node import ComputeNode
from tierkv.dbfront.tokens.tokenizer import load_tokenizer
from tierkv.dmp.pool_node import PoolNode
from tierkv.kvcore import limits
from tierkv.kvcore.errors import (
    FeatureNotSupportedError,
    OverloadedError,
    RowLevelError,
    TransportError,
    UdfArgumentError,
)
from tierkv.kvcore.request import FinishReason, GenerateRequest

SPEC = RandomModelSpec(tiny_config(vocab_size=300, eos_token_id=1), seed=3)
"""More tokens than the tokenizer has, as models are padded to round numbers."""

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "mood": {"enum": ["good", "bad", None]},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["name", "age", "mood", "tags"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("tokenizer"))


@asynccontextmanager
async def guided_node(folder: Path, *pools: PoolNode, **changes: Any) -> AsyncIterator[ComputeNode]:
    settings = {"random_model": SPEC, "tokenizer_folder": str(folder)} | changes
    async with running_node(*pools, **settings) as node:
        yield node


def prompt_of(number: int) -> list[int]:
    return random.Random(number).choices(range(5, 261), k=20 + number % 17)


def guided(number: int, schema: str = PERSON, **changes: Any) -> GenerateRequest:
    sampling = {"max_tokens": 200} | changes.pop("sampling", {})
    return make_request(prompt_of(number), guide=schema, sampling=sampling, **changes)


def text_of(folder: Path, tokens: Sequence[int]) -> str:
    return load_tokenizer(folder).decode(tokens)


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.tuples(st.integers(-50, 50), st.integers(0, 1000))
    return st.one_of(
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": "x\n\"y"}]),
        bounds.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}),
        st.integers(0, 12).map(lambda n: {"type": "string", "maxLength": n}),
        st.lists(st.text(max_size=5) | st.integers() | st.none(), min_size=1, max_size=4).map(
            lambda values: {"enum": values}
        ),
    )  # fmt: skip


def nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.text(st.characters(categories=["Ll", "Nd"]), min_size=1, max_size=4)
    return st.one_of(
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda x: {"type": "array", "items": x[0], "minItems": x[1], "maxItems": x[1] + x[2]}
        ),
        st.tuples(st.dictionaries(names, inner, max_size=3), st.integers(0, 3)).map(
            lambda x: {
                "type": "object",
                "properties": x[0],
                "required": list(x[0])[: x[1]],
                "additionalProperties": False,
            }
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
    )


SCHEMAS = st.recursive(leaves(), nested, max_leaves=6)


@given(schemas=st.lists(SCHEMAS, min_size=1, max_size=6), temperature=st.sampled_from([0.0, 1.5]))
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_every_answer_validates(folder: Path, schemas: list[Any], temperature: float) -> None:
    async def run() -> None:
        sampling = {"max_tokens": 400, "temperature": temperature, "seed": 5}
        async with guided_node(folder, l1_pages=400) as node:
            asked = [guided(i, json.dumps(s), sampling=sampling) for i, s in enumerate(schemas)]
            got = await asyncio.gather(*(answer(node, request) for request in asked))
        for (tokens, last), schema in zip(got, schemas, strict=True):
            assert last.finish_reason is FinishReason.STOP
            jsonschema.validate(json.loads(text_of(folder, tokens)), schema)

    asyncio.run(run())


async def test_an_answer_that_is_cut_says_so(folder: Path) -> None:
    async with guided_node(folder) as node:
        whole, _ = await answer(node, guided(1))
        cut, last = await answer(node, guided(1, sampling={"max_tokens": len(whole) - 1}))
        assert cut == whole[:-1] and last.finish_reason is FinishReason.LENGTH
        exact, last = await answer(node, guided(1, sampling={"max_tokens": len(whole)}))
        assert exact == whole and last.finish_reason is FinishReason.STOP


async def test_a_number_ends_with_an_end_token(folder: Path) -> None:
    """Digits may always follow digits: only eos says that it is over, whatever ignore_eos says."""
    schema = json.dumps({"type": "integer", "minimum": 1, "maximum": 99})
    async with guided_node(folder) as node:
        tokens, last = await answer(node, guided(2, schema, sampling={"max_tokens": 4}))
        assert last.finish_reason is FinishReason.STOP and 1 not in tokens
        assert 1 <= int(text_of(folder, tokens)) <= 99
        assert last.usage is not None and last.usage.completion_tokens == len(tokens)


async def test_guided_answers_with_and_without_cache(folder: Path) -> None:
    pool = MemoryPoolNode()
    async with guided_node(folder, pool) as node:
        cold = [(await answer(node, guided(i, use_cache=False)))[0] for i in range(4)]
        for _ in range(2):
            assert [(await answer(node, guided(i)))[0] for i in range(4)] == cold
        assert await node.flush()
        await node.drop_cache()
        again = [await answer(node, guided(i)) for i in range(4)]
        assert [tokens for tokens, _ in again] == cold
        assert all(last.usage.hit_tokens.l2 >= 16 for _, last in again)
        assert node.speculation.guessed_tokens == 0


async def test_a_preempted_answer_goes_on_where_it_was(folder: Path) -> None:
    async with guided_node(folder, l1_pages=65) as node:
        want = [(await answer(node, guided(i)))[0] for i in range(5)]
    for pools in ((), (MemoryPoolNode(),)):
        async with guided_node(folder, *pools, l1_pages=32) as node:
            got = await asyncio.gather(*(answer(node, guided(i)) for i in range(5)))
            assert node._engine.batcher.preemptions > 0
            await all_given_back(node)
        assert [tokens for tokens, _ in got] == want


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_another_node_goes_on_wherever_the_first_was_lost(
    folder: Path, temperature: float
) -> None:
    sampling = {"temperature": temperature, "seed": 9}
    async with guided_node(folder) as first, guided_node(folder) as second:
        request = guided(3, sampling=sampling)
        whole, end = await answer(first, request)
        for known in range(1, len(whole) + 1, 7):
            resumed = guided(3, sampling=sampling)
            resumed = make_request(
                [*resumed.token_ids, *whole[:known]], guide=PERSON, resumed_tokens=known,
                sampling={"max_tokens": 200} | sampling,
            )  # fmt: skip
            tokens, last = await answer(second, resumed)
            assert whole[:known] + tokens == whole
            assert last.finish_reason is end.finish_reason is FinishReason.STOP
            assert last.usage.completion_tokens == len(whole)


async def test_an_answer_that_was_complete_ends_at_once(folder: Path) -> None:
    async with guided_node(folder) as node:
        whole, _ = await answer(node, guided(3))
        resumed = make_request(
            [*prompt_of(3), *whole], guide=PERSON, resumed_tokens=len(whole),
            sampling={"max_tokens": 200},
        )  # fmt: skip
        tokens, last = await answer(node, resumed)
        assert tokens == [] and last.finish_reason is FinishReason.STOP
        wrong = make_request(
            [*prompt_of(3), *whole, 9], guide=PERSON, resumed_tokens=len(whole) + 1
        )
        with pytest.raises(RowLevelError, match=r"held to its form|behind the end"):
            await answer(node, wrong)
        other = make_request([*prompt_of(3), 9, 9], guide=PERSON, resumed_tokens=2)
        with pytest.raises(RowLevelError, match=r"held to its form|behind the end"):
            await answer(node, other)


async def test_a_prefill_node_hands_a_guided_answer_over(folder: Path) -> None:
    pool = MemoryPoolNode()
    async with guided_node(folder, pool) as first, guided_node(folder, pool) as second:
        want, _ = await answer(first, guided(4, use_cache=False))
        head, last = await answer(first, guided(4, handoff=True))
        assert last.finish_reason is FinishReason.HANDOFF and head == want[:1]
        tail, _ = await answer(
            second,
            make_request([*prompt_of(4), *head], guide=PERSON, resumed_tokens=1,
                         sampling={"max_tokens": 200}),
        )  # fmt: skip
        assert head + tail == want
        short = json.dumps({"enum": [7]})
        tokens, last = await answer(first, guided(4, short, handoff=True))
        assert text_of(folder, tokens) == "7" and last.finish_reason is FinishReason.STOP


async def test_plain_answers_beside_guided_ones_and_readouts_stay_as_they_are(
    folder: Path,
) -> None:
    plain = [make_request(prompt_of(i), sampling={"max_tokens": 60}) for i in range(4)]
    async with guided_node(folder) as node:
        want = [(await answer(node, request))[0] for request in plain]
        alone = [(await answer(node, guided(i)))[0] for i in range(3)]
    async with guided_node(folder, load_policy=LoadPolicy.NEVER) as node:
        others = [guided(i) for i in range(3)]
        others += [make_request(prompt_of(6), embed=True), make_request(prompt_of(7), embed=True)]
        others += [make_request(prompt_of(8), score_token_ids=(4, 5))]
        plain = [make_request(r.token_ids, sampling={"max_tokens": 60}) for r in plain]
        got = await asyncio.gather(*(answer(node, request) for request in [*plain, *others]))
    assert [tokens for tokens, _ in got[:4]] == want
    assert [tokens for tokens, _ in got[4:7]] == alone
    assert [len(last.embedding) for _, last in got[7:9]] == [64, 64]


async def test_a_matcher_that_breaks_fails_its_request_alone(folder: Path) -> None:
    async with guided_node(folder) as node:
        want, _ = await answer(node, make_request(prompt_of(1), sampling={"max_tokens": 60}))
        good = node._guides.guide

        async def broken(request: GenerateRequest) -> Any:
            guide = await good(request)
            if guide is not None:
                for token in (9, 9):  # Nothing that the schema allows.
                    guide._matcher.consume_token(token)
            return guide

        node._guides.guide = broken
        plain = asyncio.create_task(
            answer(node, make_request(prompt_of(1), sampling={"max_tokens": 60}))
        )
        with pytest.raises(RowLevelError, match="held to its form"):
            await answer(node, guided(1))
        assert (await plain)[0] == want


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("[1]", "a list, not an object"),
        ("{", "no JSON"),
        ('{"type": "strin"}', "strin"),
        ('{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ('{"x-guidance": {"lenient": true}, "not": {}}', "not"),
        ('{"type": "integer", "multipleOf": 1000003}', "multipleOf"),
        ('{"allOf": [{"multipleOf": 997}, {"multipleOf": 0.991}]}', "multipleOf"),
        ('{"const": NaN}', "no JSON"),
        ('{"const": "\\ud800"}', "no JSON"),
        ('{"$ref": "#"}', "can't be held"),
        ('{"type": "array", "items":' * 200 + "{}" + "}" * 200, "no JSON"),
        ('{"type": "array", "items":' * 2_000 + "{}" + "}" * 2_000, "no JSON"),
        (f'{{"enum": ["{"x" * limits.MAX_SCHEMA_CHARS}"]}}', "limit"),
    ],
)
async def test_a_schema_that_cannot_be_followed_is_named(
    folder: Path, schema: str, reason: str
) -> None:
    async with guided_node(folder) as node:
        with pytest.raises(UdfArgumentError, match=reason):
            await answer(node, guided(1, schema))
        assert len((await answer(node, make_request(prompt_of(1))))[0]) == 12


async def test_a_schema_that_turns_out_too_hard_fails_its_own_answers(folder: Path) -> None:
    hard = json.dumps({"type": "string", "pattern": "^(a{1000}){1000}$"})
    async with guided_node(folder) as node:
        plain, failed = await asyncio.gather(
            answer(node, make_request(prompt_of(1))), answer(node, guided(1, hard)),
            return_exceptions=True,
        )  # fmt: skip
        assert isinstance(failed, RowLevelError) and "too many expressions" in failed.message
        assert not isinstance(plain, BaseException) and len(plain[0]) == 12
        await all_given_back(node)


async def test_a_model_without_tokenizer_says_what_is_missing() -> None:
    async with running_node() as node:
        with pytest.raises(FeatureNotSupportedError, match=r"tokenizer\.json"):
            await answer(node, make_request([1, 2, 3], guide=PERSON))


async def test_a_tokenizer_with_more_tokens_than_the_model(folder: Path) -> None:
    spec = RandomModelSpec(tiny_config(vocab_size=200, eos_token_id=1), seed=3)
    schema = json.dumps({"type": "boolean"})
    async with guided_node(folder, random_model=spec) as node:
        tokens, last = await answer(node, make_request([5, 6, 7], guide=schema))
        assert text_of(folder, tokens) in ("true", "false")
        assert last.finish_reason is FinishReason.STOP


async def test_many_schemas_are_compiled_once_each(folder: Path) -> None:
    schemas = [json.dumps({"enum": [number]}) for number in range(70)]
    async with guided_node(folder) as node:
        asked = [guided(i, schema) for i, schema in enumerate([*schemas, *schemas[-60:]])]
        got = await asyncio.gather(*(answer(node, request) for request in asked))
        assert [text_of(folder, tokens) for tokens, _ in got] == [
            str(number) for number in [*range(70), *range(10, 70)]
        ]
        assert len(node._guides._compiled) == 64


class SlowCompiler:
    """Holds compiling threads until ``gate`` opens; counts them."""

    def __init__(self, node: ComputeNode) -> None:
        self.gate = threading.Event()
        self.entered = self.busy = self.most_busy = 0
        self._compile = node._guides._compile
        node._guides._compile = self

    def __call__(self, schema: str) -> Any:
        self.entered += 1
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        assert self.gate.wait(30)
        self.busy -= 1
        return self._compile(schema)

    async def until(self, entered: int) -> None:
        async with asyncio.timeout(20):
            while self.entered < entered:
                await asyncio.sleep(0.001)


async def test_nobody_waits_for_a_compiler_but_those_who_want_its_schema(folder: Path) -> None:
    async with guided_node(folder) as node:
        slow = SlowCompiler(node)
        first = [asyncio.create_task(answer(node, guided(1))) for _ in range(2)]
        await slow.until(1)
        assert len((await answer(node, make_request(prompt_of(1))))[0]) == 12
        first[0].cancel()  # The other one still wants it.
        await asyncio.gather(first[0], return_exceptions=True)
        slow.gate.set()
        assert (await first[1])[1].finish_reason is FinishReason.STOP
        assert slow.entered == 1


async def test_callers_who_leave_do_not_pile_compilers_up(folder: Path) -> None:
    schemas = [json.dumps({"enum": [number]}) for number in range(258)]
    async with guided_node(folder) as node:
        slow = SlowCompiler(node)
        left = [asyncio.create_task(answer(node, guided(1, schema))) for schema in schemas]
        await slow.until(1)
        for task in left:
            task.cancel()
        ended = await asyncio.gather(*left, return_exceptions=True)
        assert sum(isinstance(end, OverloadedError) for end in ended) == 2
        slow.gate.set()
        tokens, _ = await answer(node, guided(1, schemas[255]))
        assert text_of(folder, tokens) == "255"
        assert slow.entered == 256 and slow.most_busy == 1


async def test_a_node_stops_while_a_schema_is_compiled(folder: Path) -> None:
    async with guided_node(folder) as node:
        slow = SlowCompiler(node)
        asked = asyncio.create_task(answer(node, guided(1)))
        await slow.until(1)
        stopping = asyncio.create_task(node.stop())
        with pytest.raises(TransportError, match="stopping"):
            await asked
        slow.gate.set()
        await stopping
