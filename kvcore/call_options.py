"""What a call of a model asks besides its prompt: the value, and one table that declares it.

A new option is a field of CallOptions, a row of OPTIONS and the code that heeds the option. SQL's
``options => {...}`` (sql/calls/arguments.py), ``SET tierkv.*`` (sql/settings.py) and the bodies of
REST (dbfront/http/schema.py) read names, bounds and descriptions from the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from tierkv.kvcore import limits
from tierkv.kvcore.request import BlendSelector, ReuseHint
from tierkv.kvcore.value_kinds import (
    Duration,
    Flag,
    Number,
    OneOf,
    Text,
    Texts,
    ValueKind,
    Whole,
)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of one call; None leaves an option to the session, and then to the node.

    Attributes:
        temperature: 0.0 to 2.0; 0.0 is greedy.
        top_p: nucleus mass in (0, 1].
        max_tokens: most completion tokens; None at the node: what is left of the context.
        stop: strings that end the answer.
        seed: makes sampling repeatable.
        ignore_eos: go on at the end token.
        cache: False neither reads nor publishes KV.
        cache_salt: keeps KV apart inside the tenant, under the tenant's policy.
        session_id: conversation, for affinity.
        priority: lower runs earlier.
        timeout_s: time for one try of the call; 0.0 is no limit.
        retries: tries after the first of a call that may pass when tried again.
        blend: False answers exactly although the namespace blends documents; True asks for
            blending, so that a refusal is told.
        recompute_ratio: share of reused document tokens computed again; the namespace's share is
            the least.
        selector: which of them.
        chunk_separator: the pieces of the prompt between two separators are chunks.
        hint: when the KV will be wanted again.
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

    def over(self, defaults: CallOptions) -> CallOptions:
        """Return these options, with what they leave open taken from ``defaults``."""
        pairs = zip(_values(self), _values(defaults), strict=True)
        return CallOptions(*[theirs if own is None else own for own, theirs in pairs])


_values: Final = attrgetter(*CallOptions.__slots__)
"""All values in the order of the fields. ``dataclasses.astuple`` takes 20 times as long."""


@dataclass(frozen=True, slots=True)
class OptionSetting:
    """The ``SET tierkv.NAME`` that gives an option to all calls of a session.

    Attributes:
        name: without ``tierkv.``.
        default: what SHOW prints before any SET; None is shown as an empty text, and an empty text
            is read as None.
        doc: what the setting means, for SHOW ALL; empty: as the option.
        leaves_open: a value that says nothing about the option.
    """

    name: str
    default: str | int | float | bool | None
    doc: str = ""
    leaves_open: bool | None = None

    def to_option(self, value: Any) -> Any:
        """Return the option that a value of the setting stands for."""
        return None if value == self.leaves_open else value


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """The declaration of one option.

    Attributes:
        name: the field of CallOptions.
        kind: type and bounds; None: only REST has the option, in a shape of its own.
        doc: what it means, for REST's API page.
        sql: key in ``options => {...}``; empty: not there.
        rest: field of a REST body; empty: not there.
        setting: the session's setting.
        usual: what a call of SQL takes when neither the call nor a setting says.
        rest_kind: where REST's bounds are wider.
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
        "0 is greedy; 1 when left out",
        sql="temperature",
        rest="temperature",
        setting=OptionSetting("temperature", 0.0, "sampling temperature; 0 is greedy"),
    ),
    OptionSpec(
        "top_p",
        Number(0, 1, above_low=True),
        "share of the probability that is sampled from",
        sql="top_p",
        rest="top_p",
        usual=1.0,
    ),
    OptionSpec(
        "max_tokens",
        Whole(1, limits.MAX_COMPLETION_TOKENS),
        "most tokens of the answer",
        sql="max_tokens",
        rest="max_tokens",
        setting=OptionSetting("max_tokens", 512, "most tokens of an answer"),
    ),
    OptionSpec(
        "stop",
        Texts(limits.MAX_STOP_STRINGS, limits.MAX_STOP_STRING_CHARS),
        "text, or up to 16 texts, at which the answer ends",
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
        setting=OptionSetting("seed", None, "sampling seed; empty draws one"),
        rest_kind=Whole(),
    ),
    OptionSpec(
        "timeout_s",
        Duration(most_ms=86_400_000),
        "time for one try of the call",
        sql="timeout_ms",
        setting=OptionSetting("request_timeout", 0.0, "time for one call, such as 30s; 0: none"),
    ),
    OptionSpec(
        "retries",
        Whole(0, limits.MAX_RETRIES),
        "tries after the first of a call whose time ran out or whose node was lost",
        sql="retries",
        setting=OptionSetting("max_retries", 0),
    ),
    OptionSpec(
        "priority",
        Whole(-limits.MAX_PRIORITY, limits.MAX_PRIORITY),
        "-100 to 100; lower runs earlier",
        sql="priority",
        rest="priority",
        setting=OptionSetting("priority", 0, "of calls that have none; lower runs earlier"),
        rest_kind=Whole(),
    ),
    OptionSpec(
        "cache",
        Flag(),
        "false neither reads nor publishes KV",
        sql="cache",
        rest="use_cache",
        setting=OptionSetting("cache", True, "read and publish KV; off for comparison"),
    ),
    OptionSpec(
        "blend",
        Flag(),
        "false: exact although the namespace allows blending",
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
        "least share of reused document tokens that are computed again",
        sql="recompute_ratio",
        rest="recompute_ratio",
        setting=OptionSetting(
            "recompute_ratio",
            None,
            "least share of reused document tokens computed again; empty: the namespace's",
        ),
    ),
    OptionSpec(
        "selector",
        OneOf(tuple(BlendSelector)),
        "which of them",
        sql="selector",
        rest="selector",
        setting=OptionSetting(
            "selector",
            None,
            f"which of them: {', '.join(BlendSelector)}; empty: the namespace's",
        ),
    ),
    OptionSpec(
        "chunk_separator",
        Text(),
        "what stands between two of these in the message is a document, too",
        rest="chunk_separator",
        setting=OptionSetting(
            "chunk_separator",
            "",
            "what stands between two of these in a prompt is a document; empty: nothing",
        ),
    ),
    OptionSpec(
        "session_id",
        Text(),
        "names the conversation: among equally good nodes it returns to its last",
        rest="session_id",
    ),
    OptionSpec(
        "cache_salt",
        Text(pattern=limits.NAME_PATTERN),
        "only requests of the same key and salt share blocks",
        rest="cache_salt",
    ),
    OptionSpec("ignore_eos", Flag(), "go on at the end token, for benchmarks", rest="ignore_eos"),
    OptionSpec(
        "hint",
        None,
        "what is known of the next turn; an answer never changes by it",
        rest="reuse",
    ),
)


def _usual(option: OptionSpec) -> Any:
    setting = option.setting
    return option.usual if setting is None else setting.to_option(setting.default)


USUAL: Final = CallOptions(**{option.name: _usual(option) for option in OPTIONS})
"""What a call of SQL takes before any SET."""
