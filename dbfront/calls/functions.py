"""The AI functions: each function's recipe by name, and the recipes over a single row.

``ai_generate`` and its JSON and detail forms generate text. ``ai_extract`` asks one question per
field, or one question for JSON of a schema. ``ai_embed`` and ``ai_similarity`` compute vectors of
unit length. ``ai_filter``, ``ai_classify``, ``ai_classify_multi`` and ``ai_score`` generate no
text: these functions read the probabilities of a few labels. ``ai_chat`` answers in a conversation
that the front keeps. ``ai_count_tokens`` needs only the tokenizer. ``ai_warm``, ``ai_pin``,
``ai_locate``, ``ai_forget`` and ``ai_kv_*`` are about the KV of a prompt
(dbfront/generation/steering.py). aggregates.py has the recipes over groups of rows.

dbfront/calls/evaluation.py starts recipes here; dbfront/explain/estimate.py starts the same recipes
to estimate their cost. A new AI function needs a recipe here and a row in sql/calls/functions.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from tierkv.dbfront.calls.aggregates import aggregate, summarize
from tierkv.dbfront.calls.recipe import (
    CountTokens,
    Recipe,
    ask_model,
    embed_text,
)
from tierkv.dbfront.contracts import CallDefaults, SessionCall, TextAnswer, TextCall
from tierkv.kvcore.call_options import AnswerScope, KvAction, Steering
from tierkv.kvcore.errors import RowLevelError, TierKVError
from tierkv.kvcore.request import FinishReason
from tierkv.sql.calls.ai_call import AiCall
from tierkv.sql.calls.arguments import field_questions
from tierkv.sql.text.durations import seconds_of
from tierkv.sql.text.exact_values import exact_value

_YES: Final = ("yes", "Yes")
_YES_OR_NO: Final = (*_YES, "no", "No")
"""Models start an answer differently; the spellings of a word share its probability."""

_DIGITS: Final = tuple("0123456789")
_SCORE_DIGITS: Final = 5
"""Decimal places of a score; further digits depend on the composition of the batch."""

_HOLE: Final = "{0}"
_CERTAIN: Final = 0.5


def filter_rows(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Return True if yes is more likely than no."""
    (answer,) = yield (_yes_or_no(call, defaults, call.text("predicate")),)
    return _chance_of_yes(answer) > _CERTAIN


def classify(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Return the most likely category."""
    categories = call.texts("categories")
    instruction = call.text("instruction") or _which_of(categories)
    asked = ask_model(call, defaults, call.text("input"), question=instruction, labels=categories)
    (answer,) = yield (asked,)
    chances = answer.label_probabilities
    return categories[max(range(len(categories)), key=chances.__getitem__)]


def classify_multi(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Return the matching categories, in the order of the list; each category is one question."""
    categories = call.texts("categories")
    instruction = call.text("instruction") or f"Is it about {_HOLE}?"
    answers = yield tuple(
        ask_model(
            call,
            defaults,
            call.text("input"),
            question=_about(instruction, category),
            labels=_YES_OR_NO,
        )
        for category in categories
    )
    return [
        category
        for category, answer in zip(categories, answers, strict=True)
        if _chance_of_yes(answer) > _CERTAIN
    ]


def score(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Return the expected digit as a share of nine."""
    criteria = call.text("criteria")
    if call.get("input") is None:
        asked = ask_model(call, defaults, criteria, labels=_DIGITS)
    else:
        question = f"{criteria}\nAnswer with a digit from 0 (not at all) to 9 (completely)."
        asked = ask_model(call, defaults, call.text("input"), question=question, labels=_DIGITS)
    (answer,) = yield (asked,)
    expected = sum(digit * chance for digit, chance in enumerate(answer.label_probabilities))
    return round(min(max(expected / 9, 0.0), 1.0), _SCORE_DIGITS)


def _yes_or_no(call: AiCall, defaults: CallDefaults, predicate: str) -> TextCall:
    if call.get("input") is None:
        return ask_model(call, defaults, predicate, labels=_YES_OR_NO)
    question = f"{predicate}\nAnswer yes or no."
    return ask_model(call, defaults, call.text("input"), question=question, labels=_YES_OR_NO)


def _chance_of_yes(answer: TextAnswer) -> float:
    chances: tuple[float, ...] = answer.label_probabilities
    return sum(chances[: len(_YES)])


def _which_of(categories: tuple[str, ...]) -> str:
    return f"Which category fits best: {', '.join(categories)}?"


def _about(instruction: str, category: str) -> str:
    if _HOLE in instruction:
        return instruction.replace(_HOLE, category)
    return f"{instruction} Does this fit: {category}?"


def count_tokens(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Return the number of tokens of a text, without tokens of the chat template."""
    model = call.model or defaults.model
    counted = yield CountTokens((call.text("input"),), model)
    return counted.counts[0]


def embed(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Return a text's vector."""
    text = _not_empty(call.text("input"))
    (answer,) = yield (embed_text(call, defaults, text),)
    return list(answer.embedding)


def similarity(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Return the cosine of the angle between two texts' vectors, 1.0 for equal texts."""
    texts = [_not_empty(call.text(name)) for name in ("a", "b")]
    one, other = yield tuple(embed_text(call, defaults, text) for text in texts)
    # Vectors have unit length up to rounding; equal vectors must give 1.0.
    length = math.sqrt(_product(one, one) * _product(other, other))
    return min(max(_product(one, other) / (length or 1.0), -1.0), 1.0)


def _product(one: TextAnswer, other: TextAnswer) -> float:
    return math.fsum(a * b for a, b in zip(one.embedding, other.embedding, strict=True))


def _not_empty(text: str) -> str:
    if not text:
        raise RowLevelError("an empty text has no embedding", hint="Use nullif(text, '').")
    return text


def generate(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Return the answer's text."""
    (answer,) = yield (ask_model(call, defaults, call.text("prompt")),)
    return answer.text


def generate_json(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Return the JSON value of an answer constrained to a schema."""
    asked = ask_model(call, defaults, call.text("prompt"), json_schema=call.text("schema"))
    (answer,) = yield (asked,)
    return _parsed_json(answer)


def generate_detail(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Return the answer with its cost."""
    asked = ask_model(call, defaults, call.text("prompt"))
    (answer,) = yield (asked,)
    return {
        "value": answer.text,
        "error": None,
        "error_code": None,
        "model": answer.model or asked.model,
        "finish_reason": answer.finish_reason.value,
        "prompt_tokens": answer.usage.prompt_tokens,
        "cached_tokens": answer.usage.hit_tokens.total,
        "completion_tokens": answer.usage.completion_tokens,
        "ttft_ms": 1000 * answer.ttft_s,
        "latency_ms": 1000 * answer.total_s,
        "cached": answer.cached,
    }


def failed_detail(call: AiCall, defaults: CallDefaults, error: TierKVError) -> dict[str, Any]:
    """Return the value of ``ai_generate_detail`` for a failed call."""
    return {
        "value": None,
        "error": error.message,
        "error_code": error.sqlstate,
        "model": call.model or defaults.model,
        "finish_reason": None,
        "prompt_tokens": None,
        "cached_tokens": None,
        "completion_tokens": None,
        "ttft_ms": None,
        "latency_ms": None,
        "cached": None,
    }


def _parsed_json(answer: TextAnswer) -> Any:
    """Return an answer's JSON value.

    Raises:
        RowLevelError: the answer was cut off, or is not JSON.
    """
    cut = answer.finish_reason is FinishReason.LENGTH
    with suppress(ValueError):
        value = exact_value(answer.text)
        # A number that was cut off may lack digits.
        if not cut or isinstance(value, bool) or not isinstance(value, int | float):
            return value
    raise RowLevelError(
        "the JSON answer was cut at max_tokens" if cut else "the answer is not JSON",
        hint="Raise max_tokens, or ask for a shorter answer." if cut else "",
    )


_AS_JSON: Final = "Extract the data as JSON."
_NOTHING: Final = frozenset({"", "none", "null", "unknown", "n/a"})
"""Answers that mean there is no value, in lower case and without a final full stop."""


def extract(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Return the fields as a JSON object."""
    schema = json.loads(call.text("schema"))
    instruction = call.text("instruction")
    questions = field_questions(schema)
    if questions is None:
        asked = ask_model(
            call,
            defaults,
            call.text("input"),
            question=instruction or _AS_JSON,
            json_schema=call.text("schema"),
        )
        (answer,) = yield (asked,)
        return _parsed_json(answer)
    about = f"{call.text('input')}\n{instruction}" if instruction else call.text("input")
    answers = yield tuple(
        ask_model(call, defaults, about, question=question) for question in questions.values()
    )
    return {name: _value(answer.text) for name, answer in zip(questions, answers, strict=True)}


def _value(text: str) -> Any:
    value = text.strip()
    return None if value.lower().rstrip(".") in _NOTHING else value


def chat(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Answer the next message of a conversation; the front keeps both."""
    asked = ask_model(call, defaults, _said(call.text("message")))
    options = replace(asked.options, answer_cache=None)
    (answer,) = yield SessionCall(call.text("session"), replace(asked, options=options))
    return answer.text


def _said(message: str) -> str:
    if not message:
        raise RowLevelError("an empty message has no answer", hint="Use nullif(message, '').")
    return message


def warm(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Compute a prompt's KV, unless it is stored; return the number of the prompt's tokens."""
    (answer,) = yield (_question(call, defaults, Steering(KvAction.WARM)),)
    return json.loads(answer.text)["tokens"]


def pin(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Warm a prompt, and keep its KV in the pool's memory for a time; return JSON."""
    keep_s = seconds_of(call.text("keep")) or 0.0
    (answer,) = yield (_question(call, defaults, Steering(KvAction.PIN, keep_s)),)
    return json.loads(answer.text)


def locate(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Tell where the KV of a prompt is now; return JSON."""
    (answer,) = yield (_question(call, defaults, Steering(KvAction.LOCATE)),)
    return json.loads(answer.text)


def forget(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Remove a prompt's KV, and all KV behind the prompt, from every tier; return JSON."""
    keeps = call.options.answer_cache is AnswerScope.OFF
    steering = Steering(KvAction.FORGET, keeps_answers=keeps)
    (answer,) = yield (_question(call, defaults, steering),)
    return json.loads(answer.text)


def steer_kv(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Do with the KV of a prompt, or of a session, what ``/v1/kv`` does; return the same JSON."""
    steering = Steering(_ACTIONS[call.function], seconds_of(call.text("keep")) or 0.0)
    asked = _question(call, defaults, steering)
    if session := call.text("session"):
        (answer,) = yield SessionCall(session, asked)
    else:
        (answer,) = yield (asked,)
    return json.loads(answer.text)


_ACTIONS: Final = {
    "ai_kv_prefetch": KvAction.WARM,
    "ai_kv_pin": KvAction.PIN,
    "ai_kv_retain": KvAction.RETAIN,
    "ai_kv_demote": KvAction.DEMOTE,
    "ai_kv_locate": KvAction.LOCATE,
    "ai_kv_forget": KvAction.FORGET,
}


def _question(call: AiCall, defaults: CallDefaults, steering: Steering) -> TextCall:
    asked = ask_model(call, defaults, call.text("prompt") or call.text("session"))
    options = replace(asked.options.greedy(), max_tokens=1, answer_cache=None)
    return replace(asked, options=options, steering=steering)


_RECIPES: Final[dict[str, Callable[[AiCall, CallDefaults], Recipe]]] = {
    "ai_generate": generate,
    "ai_generate_json": generate_json,
    "ai_generate_detail": generate_detail,
    "ai_filter": filter_rows,
    "ai_classify": classify,
    "ai_classify_multi": classify_multi,
    "ai_extract": extract,
    "ai_score": score,
    "ai_similarity": similarity,
    "ai_embed": embed,
    "ai_agg": aggregate,
    "ai_summarize_agg": summarize,
    "ai_count_tokens": count_tokens,
    "ai_chat": chat,
    "ai_warm": warm,
    "ai_pin": pin,
    "ai_locate": locate,
    "ai_forget": forget,
    **dict.fromkeys(_ACTIONS, steer_kv),
}
"""By canonical function name (sql/calls/functions.py)."""


def start_recipe(call: AiCall, defaults: CallDefaults) -> Recipe:
    """Start the recipe of a call whose context is written as text (``ContextFields.written``)."""
    return _RECIPES[call.function](call, defaults)
