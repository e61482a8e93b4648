"""What a call of a model asks besides its prompt: the value, and one table that declares it.

A new option is a field of CallOptions, a row of OPTIONS and the code that applies it. SQL's
``options => {...}`` (sql/calls/arguments.py), ``SET tierkv.*`` (sql/settings.py) and the bodies of
REST (dbfront/http/schema.py) read names, bounds and descriptions from the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final

from tierkv.kvcore import limits
from tierkv.kvcore.request import BlendSelector, ReuseHint
from tierkv.kvcore.value_kinds import (
    Duration,
    Flag,
    Number,
    OneOf,
    ShareOrOff,
    Text,
    Texts,
    TokenBias,
    ValueKind,
    Whole,
)


class AnswerScope(StrEnum):
    """Callers who reuse answers of each other's earlier calls; OFF: each call asks a model."""

    OFF = "off"
    SESSION = "session"
    TENANT = "tenant"
    NAMESPACE = "namespace"


TOO_SHORT: Final = "the prompt is shorter than a block"
"""Reason why nothing of a prompt can be stored."""


class KvAction(StrEnum):
    """What a call does with a prompt's KV instead of giving an answer."""

    WARM = "warm"
    PIN = "pin"
    RETAIN = "retain"
    DEMOTE = "demote"
    LOCATE = "locate"
    FORGET = "forget"


@dataclass(frozen=True, slots=True)
class Steering:
    """A call about the KV of its prompt.

    Attributes:
        action: what to do.
        keep_s: how long a pin lasts; 0.0 ends it.
        keeps_answers: of FORGET: kept answers to the prompt stay.
    """

    action: KvAction
    keep_s: float = 0.0
    keeps_answers: bool = False


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of one call; None means the session's value, or else the node's.

    Attributes:
        temperature: 0.0 to 2.0; 0.0 is greedy.
        top_p: nucleus mass in (0, 1].
        max_tokens: maximum number of completion tokens; None at the node: the rest of the context.
        stop: strings that end the answer.
        seed: makes sampling repeatable.
        ignore_eos: continue at the end token.
        cache: False: neither read nor publish KV.
        cache_salt: separates KV within the tenant; the tenant's policy still applies.
        session_id: conversation, for affinity.
        priority: lower runs earlier.
        timeout_s: time limit for one try of the call; 0.0 is no limit.
        retries: number of retries after an error that may pass.
        blend: False: an exact answer even if the namespace allows blending. True asks for blending,
            so that a refusal is reported.
        recompute_ratio: share of reused document tokens that is recomputed; at least the
            namespace's share.
        selector: how the tokens to recompute are chosen.
        chunk_separator: the text between two separators in the prompt is a chunk.
        hint: when the KV will be wanted again.
        answer_cache: whose earlier answers may be reused; OFF: none.
        answer_ttl_s: greatest age of a reused answer; 0.0: as long as answers are kept.
        top_k: draw among this many most likely tokens; 0 and -1: among all.
        min_p: least probability of a drawn token, as a share of the most likely token's.
        presence_penalty: lowers tokens that the answer has already, once each.
        frequency_penalty: lowers tokens by how often the answer has them.
        repetition_penalty: above 1 lowers tokens of prompt and answer.
        logit_bias: token ids, ascending, with the number added to their logits.
        min_tokens: the answer does not end before this many tokens.
        cascade: agreement asked of a classifier that answers rows of a statement; 0.0: none does.
        cascade_model: model of the vectors that the classifier sees; empty: the call's model.
    """

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    cache: bool | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    priority: int | None = None
    timeout_s: float | None = None
    retries: int | None = None
    blend: bool | None = None
    recompute_ratio: float | None = None
    selector: BlendSelector | None = None
    chunk_separator: str | None = None
    hint: ReuseHint | None = None
    answer_cache: AnswerScope | None = None
    answer_ttl_s: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None
    min_tokens: int | None = None
    cascade: float | None = None
    cascade_model: str | None = None

    def over(self, defaults: CallOptions) -> CallOptions:
        """Return these options; those that are None come from ``defaults``."""
        if self is UNSET:  # Most calls set no option.
            return defaults
        pairs = zip(_values(self), _values(defaults), strict=True)
        return CallOptions(*[theirs if own is None else own for own, theirs in pairs])

    def greedy(self) -> CallOptions:
        """Return these options with the most likely tokens, whatever sampling they ask for."""
        return replace(
            self,
            temperature=0.0,
            top_p=1.0,
            top_k=None,
            min_p=None,
            presence_penalty=None,
            frequency_penalty=None,
            repetition_penalty=None,
            logit_bias=None,
            min_tokens=None,
        )


UNSET: Final = CallOptions()
"""No option is set. ``USUAL`` has the values that calls get without any setting."""

_values: Final = attrgetter(*CallOptions.__slots__)
"""All values in the order of the fields. ``dataclasses.astuple`` takes 20 times as long."""


@dataclass(frozen=True, slots=True)
class OptionSetting:
    """The setting ``tierkv.NAME`` that sets an option for all calls of a session.

    Attributes:
        name: without ``tierkv.``.
        default: value before any SET; None is shown as an empty text, and an empty text is read as
            None.
        doc: description for SHOW ALL; empty: the option's description.
        leaves_open: the value that leaves the option at None.
    """

    name: str
    default: str | int | float | bool | None
    doc: str = ""
    leaves_open: bool | None = None

    def to_option(self, value: Any) -> Any:
        """Convert a value of the setting to a value of the option."""
        return None if value == self.leaves_open else value


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """The declaration of one option.

    Attributes:
        name: the field of CallOptions.
        kind: type and bounds; None: only REST has the option, with a type defined there.
        doc: description for REST's API page.
        sql: key in ``options => {...}``; empty: SQL does not have the option.
        rest: field of a REST body; empty: REST does not have the option.
        setting: the session's setting.
        usual: default of SQL calls, for an option without a setting.
        rest_kind: REST's type and bounds, if wider.
    """

    name: str
    kind: ValueKind | None
    doc: str
    sql: str = ""
    rest: str = ""
    setting: OptionSetting | None = None
    usual: Any = None
    rest_kind: ValueKind | None = None


OPTIONS: Final = (
    OptionSpec(
        "temperature",
        Number(0, 2),
        "sampling temperature; 0 is greedy; default 1",
        sql="temperature",
        rest="temperature",
        setting=OptionSetting("temperature", 0.0, "sampling temperature; 0 is greedy"),
    ),
    OptionSpec(
        "top_p",
        Number(0, 1, above_low=True),
        "nucleus sampling: share of the probability mass to sample from",
        sql="top_p",
        rest="top_p",
        usual=1.0,
    ),
    OptionSpec(
        "top_k",
        Whole(-1, limits.MAX_TOP_K),
        "sample among this many most likely tokens; 0 and -1: among all",
        sql="top_k",
        rest="top_k",
    ),
    OptionSpec(
        "min_p",
        Number(0, 1),
        "least probability of a sampled token, as a share of the most likely token's",
        sql="min_p",
        rest="min_p",
    ),
    OptionSpec(
        "presence_penalty",
        Number(-limits.MAX_PENALTY, limits.MAX_PENALTY),
        "subtracted from the logit of each token that the answer has already",
        sql="presence_penalty",
        rest="presence_penalty",
    ),
    OptionSpec(
        "frequency_penalty",
        Number(-limits.MAX_PENALTY, limits.MAX_PENALTY),
        "subtracted from a token's logit for each time that the answer has the token",
        sql="frequency_penalty",
        rest="frequency_penalty",
    ),
    OptionSpec(
        "repetition_penalty",
        Number(0, limits.MAX_PENALTY, above_low=True),
        "above 1 makes tokens of prompt and answer less likely, below 1 more likely",
        sql="repetition_penalty",
        rest="repetition_penalty",
    ),
    OptionSpec(
        "logit_bias",
        TokenBias(limits.MAX_LOGIT_BIAS, limits.MAX_BIASED_TOKENS),
        "token ids with the number, -100 to 100, that is added to their logits",
        sql="logit_bias",
        rest="logit_bias",
    ),
    OptionSpec(
        "min_tokens",
        Whole(0, limits.MAX_COMPLETION_TOKENS),
        "the answer does not end before this many tokens",
        sql="min_tokens",
        rest="min_tokens",
    ),
    OptionSpec(
        "max_tokens",
        Whole(1, limits.MAX_COMPLETION_TOKENS),
        "maximum number of tokens of the answer",
        sql="max_tokens",
        rest="max_tokens",
        setting=OptionSetting("max_tokens", 512, "maximum number of tokens of an answer"),
    ),
    OptionSpec(
        "stop",
        Texts(limits.MAX_STOP_STRINGS, limits.MAX_STOP_STRING_CHARS),
        "string, or up to 16 strings, at which the answer ends",
        sql="stop",
        rest="stop",
        usual=(),
    ),
    OptionSpec(
        "seed",
        Whole(-(1 << 63), (1 << 63) - 1),
        "makes sampling repeatable",
        sql="seed",
        rest="seed",
        setting=OptionSetting("seed", None, "sampling seed; empty: a random seed"),
        rest_kind=Whole(),
    ),
    OptionSpec(
        "timeout_s",
        Duration(most_ms=86_400_000),
        "time limit for one try of the call",
        sql="timeout_ms",
        setting=OptionSetting(
            "request_timeout", 0.0, "time limit for one try of a call, such as 30s; 0: no limit"
        ),
    ),
    OptionSpec(
        "retries",
        Whole(0, limits.MAX_RETRIES),
        "retries of a call after a timeout or a lost node",
        sql="retries",
        setting=OptionSetting("max_retries", 0),
    ),
    OptionSpec(
        "priority",
        Whole(-limits.MAX_PRIORITY, limits.MAX_PRIORITY),
        "-100 to 100; lower runs earlier",
        sql="priority",
        rest="priority",
        setting=OptionSetting(
            "priority", 0, "priority of calls that have none; lower runs earlier"
        ),
        rest_kind=Whole(),
    ),
    OptionSpec(
        "cache",
        Flag(),
        "false: neither read nor publish KV",
        sql="cache",
        rest="use_cache",
        setting=OptionSetting("cache", True, "read and publish KV; off for comparison"),
    ),
    OptionSpec(
        "blend",
        Flag(),
        "false: exact answer even if the namespace allows blending",
        sql="blend",
        rest="blend",
        setting=OptionSetting(
            "blend",
            True,
            "reuse documents at any position where the namespace allows it; off: exact answers",
            leaves_open=True,
        ),
    ),
    OptionSpec(
        "recompute_ratio",
        Number(0, 1, above_low=True),
        "least share of reused document tokens that is recomputed",
        sql="recompute_ratio",
        rest="recompute_ratio",
        setting=OptionSetting(
            "recompute_ratio",
            None,
            "least share of reused document tokens that is recomputed; empty: the namespace's",
        ),
    ),
    OptionSpec(
        "selector",
        OneOf(tuple(BlendSelector)),
        "how the tokens to recompute are chosen",
        sql="selector",
        rest="selector",
        setting=OptionSetting(
            "selector",
            None,
            f"how the tokens to recompute are chosen: {', '.join(BlendSelector)}; empty: the "
            "namespace's selector",
        ),
    ),
    OptionSpec(
        "chunk_separator",
        Text(),
        "text between two of these separators in the message is also a document",
        rest="chunk_separator",
        setting=OptionSetting(
            "chunk_separator",
            "",
            "text between two of these separators in a prompt is a document; empty: no separator",
        ),
    ),
    OptionSpec(
        "session_id",
        Text(),
        "names the conversation: among equally good nodes it returns to its last node",
        rest="session_id",
    ),
    OptionSpec(
        "cache_salt",
        Text(pattern=limits.NAME_PATTERN),
        "only requests with the same key and salt share blocks",
        rest="cache_salt",
    ),
    OptionSpec(
        "ignore_eos", Flag(), "continue at the end token, for benchmarks", rest="ignore_eos"
    ),
    OptionSpec(
        "answer_cache",
        OneOf(tuple(AnswerScope)),
        "reuse the answer of an equal earlier call of the same session, tenant or namespace; off: "
        "ask the model",
        sql="answer_cache",
        rest="answer_cache",
        setting=OptionSetting(
            "answer_cache",
            AnswerScope.OFF,
            "reuse answers of equal earlier calls of the same: session, tenant, namespace; or off",
        ),
    ),
    OptionSpec(
        "answer_ttl_s",
        Duration(most_ms=limits.MAX_ANSWER_AGE_MS),
        "greatest age of a reused answer",
        setting=OptionSetting(
            "answer_cache_ttl",
            0.0,
            "greatest age of a reused answer, such as 30min or 7d; 0: as long as answers are kept",
        ),
    ),
    OptionSpec(
        "cascade",
        ShareOrOff(0.5, 1),
        "ai_filter and ai_classify: rows answered by a classifier that agrees with the model this "
        "often; off: the model answers all rows",
        sql="cascade",
        setting=OptionSetting(
            "cascade",
            0.0,
            "a classifier answers rows of ai_filter and ai_classify if it agrees with the model "
            "this often, such as 0.95; 0 or off: never",
        ),
    ),
    OptionSpec(
        "cascade_model",
        Text(),
        "model of the vectors of tierkv.cascade",
        setting=OptionSetting(
            "cascade_model", "", "model of the vectors of tierkv.cascade; empty: the call's model"
        ),
    ),
    OptionSpec(
        "hint",
        None,
        "what the client knows about the next turn; it never changes an answer",
        rest="reuse",
    ),
)


def _usual(option: OptionSpec) -> Any:
    setting = option.setting
    return option.usual if setting is None else setting.to_option(setting.default)


USUAL: Final = CallOptions(**{option.name: _usual(option) for option in OPTIONS})
"""Options of a SQL call before any SET."""
