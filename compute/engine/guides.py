"""Holds answers to a form, a JSON schema or a grammar: which tokens may come next in an answer.

``Guides`` belongs to a node and makes a ``Guide`` per request, outside the engine thread; the guide
then belongs to the engine. The front also calls this file through compute/client.py and refuses a
bad schema before any model runs. For the front, this file never imports torch and loads the schema
compiler lazily. Compiled schemas are kept.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierkv.kvcore import limits
from tierkv.kvcore.errors import (
    FeatureNotSupportedError,
    OverloadedError,
    RowLevelError,
    TransportError,
    UdfArgumentError,
)
from tierkv.kvcore.node import ModelInfo
from tierkv.kvcore.request import GenerateRequest

_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": "[ ]?",
    "lenient": False,
    "coerce_one_of": False,
}
"""Options that win over ``x-guidance`` in a schema. At most one space between two signs, because
small models fill answers with white space if allowed. A keyword that the compiler would ignore is
refused.
"""

_MOST_MULTIPLE = 100_000
"""Upper bound on the product of all ``multipleOf`` of a schema, written without their points. The
compiler makes a state for each remainder: 100,000 states take about a second, a million take ten,
whatever its other limits.
"""

_SCHEMA_ERROR_CHARS = 300

_LARGEST_EXACT = 1 << 53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
"""Keywords whose numbers the compiler keeps as 64-bit floats. Beyond 2^53 it writes other numbers,
and recurses until the process dies where two bounds become equal.
"""


def compiler() -> Any:
    """Return the llguidance module.

    Raises:
        FeatureNotSupportedError: llguidance is not installed.
    """
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise FeatureNotSupportedError(
            "answers can't be held to a JSON schema here: llguidance is not installed",
            hint="Install tierkv[compute] on the compute nodes.",
        ) from error


GRAMMAR_HEAD = "%llguidance"
"""Begins the text of a guide that is a grammar in the compiler's Lark dialect, not a schema."""


def grammar_of(guide: str) -> str:
    """Turn a guide into the compiler's grammar text; the grammar may still not compile.

    Raises:
        UdfArgumentError: the guide is too long, or neither a JSON object nor a grammar.
        FeatureNotSupportedError: no compiler is installed.
    """
    if not guide.startswith(GRAMMAR_HEAD):
        return _grammar_of_schema(guide)
    if len(guide) > limits.MAX_TOOLS_CHARS:
        raise UdfArgumentError(
            f"the grammar has {len(guide)} characters, the limit is {limits.MAX_TOOLS_CHARS}"
        )
    return str(compiler().LLMatcher.grammar_from_lark(guide))


def _grammar_of_schema(schema: str) -> str:
    if len(schema) > limits.MAX_SCHEMA_CHARS:
        raise UdfArgumentError(
            f"the JSON schema has {len(schema)} characters, the limit is {limits.MAX_SCHEMA_CHARS}"
        )
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise UdfArgumentError(f"the JSON schema is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise UdfArgumentError(
            f"the JSON schema is {_kind(value)}, not an object",
            hint='Write it as {"type": "object", "properties": {...}}.',
        )
    _check_numbers(value)
    llguidance = compiler()
    try:
        return str(llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS))
    except ValueError as error:  # Python reads more than JSON allows; or 128 levels are exceeded.
        raise UdfArgumentError(f"the JSON schema is no JSON: {error}") from error


def _check_numbers(schema: dict[str, Any]) -> None:
    """Refuse numbers that the compiler takes for others, or for too long.

    Raises:
        UdfArgumentError: names the keyword.
    """
    multiples = set[int]()
    for part in _objects(schema):
        number = part.get("multipleOf")
        if isinstance(number, (int, float)) and math.isfinite(number):
            digits = "".join(map(str, Decimal(str(number)).as_tuple().digits))
            multiples.add(max(1, int(digits)))
        for keyword in _BOUNDS:
            if _is_beyond_exact(part.get(keyword)):
                raise UdfArgumentError(
                    f"{keyword} in the JSON schema has a number beyond {_LARGEST_EXACT} in size",
                    hint="Leave it out, and check it after the answer.",
                )
    if math.prod(multiples) > _MOST_MULTIPLE:
        raise UdfArgumentError(
            f"multipleOf in the JSON schema has more digits than can be followed: {_MOST_MULTIPLE} "
            "is the limit for the product of all",
            hint="Leave multipleOf out, and check it after the answer.",
        )


def _is_beyond_exact(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) > _LARGEST_EXACT  # type: ignore[arg-type]


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Find all objects in a JSON value."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def check_guide(guide: str) -> None:
    """Refuse a schema or grammar that can't be followed; takes milliseconds for common ones.

    Raises:
        UdfArgumentError: the guide is no JSON object and no grammar, or uses an unsupported
            keyword, which the error names.
        FeatureNotSupportedError: no compiler is installed.
    """
    grammar = grammar_of(guide)
    problem = compiler().LLMatcher.validate_grammar(grammar, limits=parser_limits())
    if problem:
        raise schema_error(problem)


def parser_limits() -> Any:
    """Return the limits of the compiler and of a matcher's steps: defaults, with short errors."""
    return compiler().LLParserLimits(verbose_errors=False)


def schema_error(problem: str) -> UdfArgumentError:
    """Make the error for a schema refused by the compiler."""
    first = " ".join(problem.split())
    return UdfArgumentError(
        f"answers can't be held to this JSON schema: {first[:_SCHEMA_ERROR_CHARS]}",
        hint="Leave that keyword out, and check it after the answer.",
    )


def _kind(value: object) -> str:
    return {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}.get(
        type(value), "a number"
    )


BoolArray = NDArray[np.bool_]

_SCHEMAS_KEPT = 64
_MOST_COMPILING = 256
_ERROR_CHARS = 200


class Guide:
    """The tokens that may continue one answer. Used by one thread at a time.

    Attributes:
        complete: the answer has ended; no token may follow.
        error: why the answer can't continue; empty while it can.
    """

    def __init__(self, matcher: Any, *, vocab_tokens: int, eos_token_ids: tuple[int, ...]) -> None:
        self.complete = False
        self.error = ""
        self._matcher = matcher
        self._vocab_tokens = vocab_tokens
        self._eos = [token for token in eos_token_ids if token < vocab_tokens]

    def allowed(self) -> BoolArray | None:
        """Return ``[vocab]``, True for tokens that may come next.

        None, with ``error`` set, if no token may come next.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        known = np.unpackbits(bits, bitorder="little")[: self._vocab_tokens]
        allowed = np.zeros(self._vocab_tokens, dtype=np.bool_)
        allowed[: len(known)] = known
        if self._matcher.is_accepting():
            allowed[self._eos] = True
        if self._matcher.is_error() or not allowed.any():
            self._fail("no token of the model can go on with the answer")
            return None
        return allowed

    def take(self, token: int) -> bool:
        """Accept the next token; return True if the answer ends, well or with ``error``."""
        if not self._matcher.consume_token(token):
            self._fail(f"token {token} does not fit")
        self.complete = bool(self._matcher.is_stopped())
        return self.complete

    def _fail(self, what: str) -> None:
        told = " ".join(self._matcher.get_error().split())[:_ERROR_CHARS]
        self.error = f"the answer can't be held to its form: {told or what}"


class Guides:
    """Makes guides for one model. The methods belong to the node's event loop."""

    def __init__(self, model: ModelInfo, *, vocab_tokens: int) -> None:
        self._model = model
        self._vocab_tokens = vocab_tokens
        self._tokenizer: Any = None
        self._specials: re.Pattern[str] | None = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._compiling: dict[str, asyncio.Task[Any]] = {}
        self._turn = asyncio.Lock()

    async def guide(self, request: GenerateRequest) -> Guide | None:
        """Return the guide of a request, advanced to the end of the known answer.

        None for free text. A schema is compiled once, in a thread; later requests take a copy,
        which takes microseconds.

        Raises:
            UdfArgumentError: the schema can't be followed.
            FeatureNotSupportedError: the model has no tokenizer.json, or no compiler is installed.
            RowLevelError: the answer generated before does not fit the schema.
            OverloadedError: too many schemas are waiting.
            TransportError: the node is stopping.
        """
        if not request.guide:
            return None
        compiled = await self._matcher(request.guide)
        guide = Guide(
            compiled.deep_copy(),
            vocab_tokens=self._vocab_tokens,
            eos_token_ids=self._model.eos_token_ids,
        )
        if request.resumed_tokens:
            await asyncio.to_thread(_resume, guide, request)
        return guide

    async def _matcher(self, schema: str) -> Any:
        """Return a schema's matcher, which has seen no token and is only copied.

        Compiling continues when the caller leaves, because the next caller may want the same
        schema; at most one thread compiles at any time.
        """
        if schema in self._compiled:
            self._compiled.move_to_end(schema)
            return self._compiled[schema]
        task = self._compiling.get(schema)
        if task is None:
            if len(self._compiling) >= _MOST_COMPILING:
                raise OverloadedError(f"{_MOST_COMPILING} JSON schemas wait to be compiled")
            task = asyncio.create_task(self._compile_in_turn(schema))
            self._compiling[schema] = task
            task.add_done_callback(lambda done: self._keep(schema, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not task.cancelled() or caller is None or caller.cancelling():
                raise
            raise TransportError("the node is stopping") from None

    async def _compile_in_turn(self, schema: str) -> Any:
        async with self._turn:
            return await asyncio.to_thread(self._compile, schema)

    def _keep(self, schema: str, done: asyncio.Task[Any]) -> None:
        del self._compiling[schema]
        if not done.cancelled() and done.exception() is None:
            self._compiled[schema] = done.result()
            if len(self._compiled) > _SCHEMAS_KEPT:
                self._compiled.popitem(last=False)

    async def close(self) -> None:
        """Cancel all compilations."""
        tasks = list(self._compiling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _compile(self, schema: str) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        grammar = grammar_of(schema)
        if self._specials is not None and self._specials.search(schema):
            grammar = _unforced(schema)
        matcher = compiler().LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=parser_limits()
        )
        matcher.compute_bitmask()  # The first call fills tables shared by all copies.
        if matcher.is_error():
            raise schema_error(matcher.get_error())
        return matcher

    def _load_tokenizer(self) -> Any:
        kind = compiler().LLTokenizer
        path = Path(self._model.folder, "tokenizer.json")
        try:
            text = path.read_text(encoding="utf-8") if self._model.folder else ""
            self._specials = _special_spellings(text) if text else None
        except (OSError, ValueError):
            text = ""
        if not text:
            raise FeatureNotSupportedError(
                f"answers of model {self._model.name} can't be held to a JSON schema: its folder "
                "has no tokenizer.json",
                hint="Add it to the model's folder on every compute node.",
            )
        ends = list(self._model.eos_token_ids) or None
        options = {"eos_token": ends, "slices": kind.json_slices()}
        try:
            return kind(text, n_vocab=self._vocab_tokens, **options)
        except ValueError:  # The tokenizer has more tokens; the model never chooses them.
            return kind(text, **options)


def _special_spellings(tokenizer_json: str) -> re.Pattern[str] | None:
    """Return a pattern of the special tokens' spellings; None if there are none."""
    added = json.loads(tokenizer_json).get("added_tokens") or ()
    spelled = [re.escape(token["content"]) for token in added if token.get("content")]
    return re.compile("|".join(spelled)) if spelled else None


def _unforced(guide: str) -> Any:
    """Make the grammar of a guide that spells special tokens.

    The compiler otherwise replaces text that can only go on in one way by its usual tokens, which
    are the special tokens themselves: the end token would end the answer.
    """
    head = f'{GRAMMAR_HEAD} {{"no_forcing": true}}\n'
    if guide.startswith(GRAMMAR_HEAD):
        return compiler().LLMatcher.grammar_from_lark(head + guide.partition("\n")[2])
    schema = json.dumps({**json.loads(guide), "x-guidance": _OPTIONS}, ensure_ascii=False)
    return compiler().LLMatcher.grammar_from_lark(f"{head}start: %json {schema}")


def _resume(guide: Guide, request: GenerateRequest) -> None:
    """Feed the tokens generated before to a new guide; an end may only stand at the end."""
    for token in request.token_ids[-request.resumed_tokens :]:
        if guide.complete or (guide.take(token) and guide.error):
            raise RowLevelError(
                guide.error or "tokens were generated behind the end of an answer held to a schema"
            )
