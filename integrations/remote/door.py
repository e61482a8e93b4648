"""The interface of foreign engines for the node (integrations/remote/node.py).

``vllm_http.py``, ``sglang_http.py`` and ``openai_http.py`` implement ``EngineDoor``. The other
values are its arguments and results, and the settings of a node with such an engine, created by
tierkv/parts/engine_part.py. Text exists only in openai_http.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from tierkv.integrations.remote.http import EngineHttp
from tierkv.kvcore.ids import NO_ZONE, HostId, NodeId, ZoneId
from tierkv.kvcore.node import NodeRole
from tierkv.kvcore.request import GenerateRequest, HitTokens


class EngineKind(StrEnum):
    """Kind of the engine's server."""

    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI = "openai"
    """Any server with OpenAI's API; exchanges text and reports nothing about its cache."""


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """One engine and its compute node.

    Attributes:
        node_id: the node's name.
        host: the node's machine.
        role: the requests that the node accepts.
        kind: kind of the engine's server.
        url: address of the engine, without ``/v1``.
        api_key: key for the Authorization header; empty: no header.
        served: the model's name in the engine; empty: the first listed model.
        model_name: the model's name in requests to TierKV; empty: the engine's name.
        model_folder: the model's files on this machine, for tokenizer and layout; empty: the folder
            reported by the engine.
        dtype: element type of the engine's KV; empty: the model's own.
        max_requests: limit of concurrent requests to the engine.
        connect_timeout_s: longest wait for a connection.
        idle_timeout_s: longest wait for the next byte of an answer.
        poll_s: seconds between looks at the engine.
        zone: the node's zone; empty if it has none.
    """

    node_id: NodeId
    host: HostId
    role: NodeRole
    kind: EngineKind
    url: str
    api_key: str = field(default="", repr=False)
    served: str = ""
    model_name: str = ""
    model_folder: str = ""
    dtype: str = ""
    max_requests: int = 256
    connect_timeout_s: float = 5.0
    idle_timeout_s: float = 300.0
    poll_s: float = 1.0
    zone: ZoneId = NO_ZONE


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Load of an engine, and counters of the engine's cache since the engine started."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    query_tokens: int = 0
    hit_tokens: int = 0
    outside_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineLook:
    """An engine's description of itself.

    Attributes:
        served: the engine's name of the model.
        folder: the engine's folder of the model's files; may be missing on this machine.
        context_tokens: most tokens of prompt and answer; 0: unknown.
        version: version of the engine, if known.
        life: differs between two starts of the engine; empty: unknown.
        block_tokens: tokens of a block in the engine's cache; 0: unknown.
        blocks: number of blocks in the engine's cache.
        dtype: element type of the engine's KV; empty or ``auto``: the model's own.
        figures: current load; not compared. Two looks with equal other fields are of one life.
    """

    served: str
    folder: str = ""
    context_tokens: int = 0
    version: str = ""
    life: str = ""
    block_tokens: int = 0
    blocks: int = 0
    dtype: str = ""
    figures: EngineFigures = field(default_factory=EngineFigures, compare=False)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request to an engine.

    Attributes:
        request: the tokens, and the parameters of the answer.
        served: the engine's name of the model.
        salt: separates tenants in the engine's cache.
        max_tokens: limit of new tokens; 0: no limit but the context.
        promised_blocks: leading blocks that another engine has just put into the pool.
        block_tokens: tokens of each promised block.
        full_report: the engine's KV events must also name the reused blocks.
    """

    request: GenerateRequest
    served: str
    salt: str
    max_tokens: int
    promised_blocks: int = 0
    block_tokens: int = 0
    full_report: bool = False


@dataclass(frozen=True, slots=True)
class Counts:
    """An engine's token counts of a request; ``hits`` are the cached tokens of the prompt."""

    prompt_tokens: int
    completion_tokens: int
    hits: HitTokens = field(default_factory=HitTokens)


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of an answer.

    Attributes:
        token_ids: new tokens; may include the token that ended the answer as the last.
        ended: finish reason in OpenAI's words; empty while the answer continues.
        counts: token counts, on the piece with ``ended``, if the engine sends them.
        scores: results of a request for scores.
    """

    token_ids: tuple[int, ...] = ()
    ended: str = ""
    counts: Counts | None = None
    scores: tuple[float, ...] = ()


class EngineDoor(Protocol):
    """An engine's HTTP API.

    1. ``look`` raises TransportError while the engine does not answer, and ConfigError if the
       engine refuses access for good. ``look`` is called every second and asks only once for
       properties that can't change while the engine lives.
    2. ``answer`` yields pieces, of which exactly the last one has ``ended``. Closing the iterator
       early aborts the request in the engine. ``answer`` raises UserError, OverloadedError or
       TransportError.
    3. For a request with ``score_token_ids``, ``answer`` yields one piece with the natural log of
       each token's probability, in the order of the request.

    Attributes:
        score_refusal: the reason why scores are not available; empty: available.
        sampling_fields: optional fields of SamplingParams that the API takes
            (``tierkv.kvcore.request.OPTIONAL_FIELDS``).
        speaks_text: the engine accepts text, so ids are bytes (integrations/remote/text_tokens.py).
        http: the connections to the engine.
    """

    score_refusal: str
    sampling_fields: tuple[str, ...]
    speaks_text: bool
    http: EngineHttp

    async def look(self) -> EngineLook: ...

    def answer(self, ask: EngineRequest) -> AsyncGenerator[AnswerPiece, None]: ...
