"""What the node (integrations/remote/node.py) needs of a foreign engine, whichever it is.

``vllm_http.py``, ``sglang_http.py`` and ``openai_http.py`` implement ``EngineDoor``; the values are
what goes through it. Text exists only in openai_http.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from tierkv.integrations.remote.http import EngineHttp
from tierkv.kvcore.request import GenerateRequest, HitTokens


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """How busy an engine is, and what its cache did since it started."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    query_tokens: int = 0
    hit_tokens: int = 0
    outside_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineLook:
    """What an engine says about itself.

    Attributes:
        served: what it calls the model.
        folder: where it says the model's files are; perhaps not a folder here.
        context_tokens: most tokens of prompt and answer; 0: it does not say.
        version: its version, as far as it tells.
        life: differs between two starts of it; empty: it does not tell.
        block_tokens: tokens of a block of its cache; 0: it does not say.
        blocks: how many blocks its cache has.
        dtype: element type of its KV; empty or ``auto``: the model's own.
        figures: how busy it is; two looks that differ in nothing else are of one life.
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
        request: the tokens and how to go on.
        served: what the engine calls the model.
        salt: keeps tenants apart in its cache.
        max_tokens: how many tokens are wanted; 0: as many as there is room for.
        promised_blocks: leading blocks that another engine has just put into the pool.
        block_tokens: how long these are.
        full_report: its KV events shall name the blocks it reuses too.
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
    """What an engine says a request cost; ``hits`` of its prompt were not computed."""

    prompt_tokens: int
    completion_tokens: int
    hits: HitTokens = field(default_factory=HitTokens)


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """A piece of an answer.

    Attributes:
        token_ids: new tokens; the one that ended the answer may be the last of them.
        ended: why it ended, in OpenAI's words; empty while it goes on.
        counts: what it cost; on the piece with ``ended``, where the engine tells.
        scores: what a request for scores asked for.
    """

    token_ids: tuple[int, ...] = ()
    ended: str = ""
    counts: Counts | None = None
    scores: tuple[float, ...] = ()


class EngineDoor(Protocol):
    """An engine's HTTP API.

    1. ``look`` raises TransportError while the engine does not answer, and ConfigError where it
       refuses us for good. It is asked every second: what an engine can't change while it lives is
       asked for once.
    2. ``answer`` yields pieces, of which the last one, and only it, has ``ended``; closing it
       early aborts the request in the engine. It raises UserError, OverloadedError or
       TransportError.
    3. Of a request with ``score_token_ids`` it yields one piece: the natural log of the chance of
       each of them, in their order.

    Attributes:
        score_refusal: why there are no scores; empty: there are.
        speaks_text: the engine gets text, so ids are bytes (integrations/remote/text_tokens.py).
        http: the connections to the engine.
    """

    score_refusal: str
    speaks_text: bool
    http: EngineHttp

    async def look(self) -> EngineLook: ...

    def answer(self, ask: EngineRequest) -> AsyncGenerator[AnswerPiece, None]: ...
