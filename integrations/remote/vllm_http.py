"""vLLM's HTTP server: token ids in and out by ``/v1/completions``, figures by ``/metrics``.

``/v1/completions`` accepts ids, salts, priorities, schemas and transfer parameters on every server.
The token-only route ``/inference/v1/generate`` would need ``--enable-scale-out``. TierKV's hints
about KV are not sent: vLLM accepts hints from Python only.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from tierkv.integrations.remote.door import (
    AnswerPiece,
    Counts,
    EngineFigures,
    EngineLook,
    EngineRequest,
)
from tierkv.integrations.remote.http import EngineHttp
from tierkv.integrations.remote.openai_http import (
    MetricsPage,
    counts_of,
    listed_model,
    only_choice,
    token_ids,
    whole,
)
from tierkv.integrations.vllm.connector_scheduler import HANDOFF
from tierkv.kvcore.errors import RemoteProtocolError, UserError
from tierkv.kvcore.request import OPTIONAL_FIELDS

_MOST_SCORED: Final = 128
"""Limit of ids in one request, vLLM's MAX_LOGPROB_TOKEN_IDS."""

_ALLOWED: Final = re.compile(r"max allowed: (\d+)")


class VllmDoor:
    """Implements EngineDoor."""

    score_refusal = ""
    sampling_fields = tuple(name for name in OPTIONAL_FIELDS if name != "logprobs")
    speaks_text = False

    def __init__(self, http: EngineHttp, *, served: str = "") -> None:
        """Create a door; ``served`` names the model if the server has several."""
        self.http = http
        self._served = served
        self._last: EngineLook | None = None
        self._takes_priority = True
        self._most_scored = _MOST_SCORED

    async def look(self) -> EngineLook:
        """Ask for the load; in a new life also for the model, version and cache's shape."""
        page = MetricsPage(await self.http.get_text("/metrics"))
        life, figures = _life(page), _figures(page)
        if self._last is None or self._last.life != life:
            self._last = None
            self._last = await self._whole_look(page, life)
        return replace(self._last, figures=figures)

    async def _whole_look(self, page: MetricsPage, life: str) -> EngineLook:
        listed = await self.http.get_json("/v1/models")
        model = listed_model(listed, self._served, self.http.where)
        version = (await self.http.get_json("/version")).get("version", "")
        cache = page.labels("vllm:cache_config_info")
        return EngineLook(
            served=str(model["id"]),
            folder=str(model.get("root") or ""),
            context_tokens=whole(model.get("max_model_len")),
            version=str(version),
            life=life,
            block_tokens=_number(cache.get("block_size")),
            blocks=_number(cache.get("num_gpu_blocks")),
            dtype=cache.get("cache_dtype", ""),
        )

    async def answer(self, ask: EngineRequest) -> AsyncGenerator[AnswerPiece, None]:
        """Stream an answer, or yield the requested scores; see EngineDoor."""
        if ask.request.score_token_ids:
            yield await self._scored(ask)
            return
        body = self._body(ask) | {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with aclosing(self._pieces(body)) as pieces:
                async for piece in pieces:
                    yield piece
        except UserError as error:
            if "priority" not in body or "priority" not in error.message:
                raise
            # The server schedules first come, first served, and refuses a priority before it
            # begins.
            self._takes_priority = False
            del body["priority"]
            async with aclosing(self._pieces(body)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _pieces(self, body: dict[str, Any]) -> AsyncGenerator[AnswerPiece, None]:
        """Parse a stream. The last piece is held back until the usage has arrived behind it."""
        last: AnswerPiece | None = None
        counts: Counts | None = None
        async with aclosing(self.http.events("/v1/completions", body)) as events:
            async for event in events:
                counts = counts_of(event) or counts
                choice = only_choice(event, self.http.where)
                if choice is None:
                    continue
                tokens = token_ids(choice.get("token_ids"), self.http.where)
                if choice.get("finish_reason"):
                    last = AnswerPiece(tokens, ended=str(choice["finish_reason"]))
                elif tokens:
                    yield AnswerPiece(tokens)
                elif choice.get("text"):
                    raise RemoteProtocolError(
                        f"{self.http.where} sends no token ids (return_token_ids): "
                        "a newer vLLM is needed"
                    )
        if last is None:
            raise RemoteProtocolError(f"{self.http.where}: an answer has no finish_reason")
        yield AnswerPiece(last.token_ids, last.ended, counts)

    def _body(self, ask: EngineRequest) -> dict[str, Any]:
        request, sampling = ask.request, ask.request.sampling
        body: dict[str, Any] = {
            "model": ask.served,
            "prompt": list(request.token_ids),
            "request_id": str(request.request_id),
            "cache_salt": ask.salt,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": ask.max_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "return_token_ids": True,
            # Sent also if neutral, so that the model's generation_config.json has no effect.
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
        if sampling.min_tokens > request.resumed_tokens:
            left = sampling.min_tokens - request.resumed_tokens
            body["min_tokens"] = min(left, ask.max_tokens)
        if sampling.seed is not None:
            body["seed"] = sampling.seed % (1 << 63)
        if request.priority and self._takes_priority:
            body["priority"] = request.priority
        if request.session_id:
            body["session_id"] = request.session_id
        if request.guide:
            body["structured_outputs"] = {"json": request.guide}
        if ask.promised_blocks:
            promise = {"blocks": ask.promised_blocks, "block_tokens": ask.block_tokens}
            body["kv_transfer_params"] = {HANDOFF: promise}
        if ask.full_report:
            body["vllm_xargs"] = {"kv_cache_report_mode": "full"}
        return body

    async def _scored(self, ask: EngineRequest) -> AnswerPiece:
        """Ask for log-probabilities of tokens, in as many requests as the limit requires."""
        wanted = ask.request.score_token_ids
        scores: dict[int, float] = {}
        first: Counts | None = None
        while missing := [token for token in dict.fromkeys(wanted) if token not in scores]:
            # One place is kept free: the sampled token takes a place too.
            some = missing[: self._most_scored - 1]
            body = self._body(ask) | {
                "max_tokens": 1,
                "temperature": 0.0,
                "logprob_token_ids": [*some, some[0]],
                "logprobs": len(some) + 1,
                "return_tokens_as_token_ids": True,
            }
            try:
                reply = await self.http.post_json("/v1/completions", body)
            except UserError as error:
                self._adapt(body, error)
                continue
            first = first or counts_of(reply)
            scores |= self._chances(reply, some)
        prompt = Counts(first.prompt_tokens, 0, first.hits) if first else None
        return AnswerPiece(
            ended="stop", counts=prompt, scores=tuple(scores[token] for token in wanted)
        )

    def _adapt(self, body: dict[str, Any], error: UserError) -> None:
        """Lower the limit of ids or omit the priority from now on, if the error asks for either."""
        allowed = _ALLOWED.search(error.message)
        if allowed and 2 <= int(allowed[1]) < self._most_scored:
            self._most_scored = int(allowed[1])
        elif "priority" in body and "priority" in error.message:
            self._takes_priority = False
        else:
            raise error

    def _chances(self, reply: dict[str, Any], tokens: list[int]) -> dict[int, float]:
        choice = only_choice(reply, self.http.where) or {}
        try:
            (table,) = choice["logprobs"]["top_logprobs"]
            return {token: float(table[f"token_id:{token}"]) for token in tokens}
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(
                f"{self.http.where} does not return probabilities of given tokens "
                "(logprob_token_ids): a newer vLLM is needed"
            ) from error


def _life(page: MetricsPage) -> str:
    """Return a text that differs between starts: the process's start time, or else a counter's."""
    started = page.most("process_start_time_seconds") or page.most(
        "vllm:prefix_cache_queries_created"
    )
    return f"{started:.3f}" if started else ""


def _figures(page: MetricsPage) -> EngineFigures:
    return EngineFigures(
        running=int(page.total("vllm:num_requests_running")),
        waiting=int(page.total("vllm:num_requests_waiting")),
        kv_usage=min(1.0, page.most("vllm:kv_cache_usage_perc")),
        query_tokens=int(page.total("vllm:prefix_cache_queries_total")),
        hit_tokens=int(page.total("vllm:prefix_cache_hits_total")),
        outside_hit_tokens=int(page.total("vllm:external_prefix_cache_hits_total")),
    )


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
