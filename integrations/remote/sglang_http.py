"""SGLang's HTTP server: token ids in and out by ``/generate``, figures by ``/metrics``.

SGLang's priorities are not used, because a flag of the server decides whether larger numbers go
first. Bodies and replies follow ``GenerateReqInput`` and ``meta_info`` of SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from tierkv.integrations.remote.door import (
    AnswerPiece,
    Counts,
    EngineFigures,
    EngineLook,
    EngineRequest,
)
from tierkv.integrations.remote.http import EngineHttp, refusal
from tierkv.integrations.remote.openai_http import MetricsPage, listed_model, token_ids, whole
from tierkv.kvcore.errors import ConfigError, RemoteProtocolError, UserError
from tierkv.kvcore.request import OPTIONAL_FIELDS, HitTokens


class SglangDoor:
    """Implements EngineDoor."""

    score_refusal = ""
    sampling_fields = tuple(name for name in OPTIONAL_FIELDS if name != "logprobs")
    speaks_text = False

    def __init__(self, http: EngineHttp, *, served: str = "") -> None:
        """Create a door; ``served`` names the model if the server has several."""
        self.http = http
        self._served = served
        self._last: EngineLook | None = None

    async def look(self) -> EngineLook:
        """Ask for the load; after a failed look also for the model, version and cache's shape.

        SGLang has no cheap start marker to query every second. A restart always takes long enough
        for a look to fail.
        """
        last, self._last = self._last, None
        figures = await self._figures()
        self._last = replace(last or await self._whole_look(), figures=figures)
        return self._last

    async def _whole_look(self) -> EngineLook:
        listed = await self.http.get_json("/v1/models")
        model = listed_model(listed, self._served, self.http.where)
        info = await self.http.get_json("/model_info")
        server = await self.http.get_json("/server_info")
        page_tokens = whole(server.get("page_size"))
        return EngineLook(
            served=str(model["id"]),
            folder=str(info.get("model_path") or ""),
            context_tokens=whole(model.get("max_model_len")),
            version=str(server.get("version") or ""),
            life=str(server.get("startup_time") or ""),
            block_tokens=page_tokens,
            blocks=whole(server.get("max_total_num_tokens")) // page_tokens if page_tokens else 0,
            dtype=str(server.get("kv_cache_dtype") or ""),
        )

    async def _figures(self) -> EngineFigures:
        """Ask for the load; all zero without ``--enable-metrics``."""
        try:
            page = MetricsPage(await self.http.get_text("/metrics"))
        except ConfigError:
            raise
        except UserError:
            return EngineFigures()
        return EngineFigures(
            running=int(page.total("sglang:num_running_reqs")),
            waiting=int(page.total("sglang:num_queue_reqs")),
            kv_usage=min(1.0, page.most("sglang:token_usage")),
            query_tokens=int(page.total("sglang:prompt_tokens_total")),
            hit_tokens=int(page.total("sglang:cached_tokens_total")),
        )

    async def answer(self, ask: EngineRequest) -> AsyncGenerator[AnswerPiece, None]:
        """Stream an answer, or yield the requested scores; see EngineDoor."""
        if ask.request.score_token_ids:
            yield await self._scored(ask)
            return
        seen: list[int] = []
        async with aclosing(self.http.events("/generate", generate_body(ask))) as events:
            async for event in events:
                tokens, counts = self._new_tokens(event, seen)
                seen += tokens
                ended = self._ended(event)
                if ended:
                    yield AnswerPiece(tokens, ended, counts)
                    return
                if tokens:
                    yield AnswerPiece(tokens)
        raise RemoteProtocolError(f"{self.http.where}: an answer has no finish_reason")

    def _new_tokens(self, event: dict[str, Any], seen: list[int]) -> tuple[tuple[int, ...], Counts]:
        """Return the new tokens: servers send all tokens so far or, with a flag, only the new ones.

        A full list may be longer than the count, because the list keeps growing while it is sent.
        """
        meta = event.get("meta_info")
        if not isinstance(event.get("output_ids"), list) or not isinstance(meta, dict):
            raise RemoteProtocolError(f"{self.http.where}: an event has no output_ids")
        ids = token_ids(event["output_ids"], self.http.where)
        counts = counts_of_meta(meta)
        if len(seen) + len(ids) == counts.completion_tokens:
            return ids, counts
        if list(ids[: len(seen)]) == seen:
            return ids[len(seen) :], counts
        raise RemoteProtocolError(
            f"{self.http.where}: an answer does not continue where it stopped"
        )

    def _ended(self, event: dict[str, Any]) -> str:
        reason = event["meta_info"].get("finish_reason")
        if not isinstance(reason, dict):
            return ""
        if reason.get("type") == "abort" and reason.get("status_code"):
            said = str(reason.get("message"))
            raise refusal(whole(reason["status_code"]) or 500, said, where=self.http.where)
        return str(reason.get("type"))

    async def _scored(self, ask: EngineRequest) -> AnswerPiece:
        reply = await self.http.post_json("/generate", score_body(ask))
        try:
            (row,) = reply["meta_info"]["output_token_ids_logprobs"]
            table = {int(token): float(chance) for chance, token, *_ in row}
            scores = tuple(table[token] for token in ask.request.score_token_ids)
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(
                f"{self.http.where} does not return token probabilities"
            ) from error
        counts = counts_of_meta(reply["meta_info"])
        return AnswerPiece(
            ended="stop", counts=Counts(counts.prompt_tokens, 0, counts.hits), scores=scores
        )


def generate_body(ask: EngineRequest) -> dict[str, Any]:
    """Return the body of ``POST /generate`` for an answer."""
    request, sampling = ask.request, ask.request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_new_tokens": ask.max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "ignore_eos": sampling.ignore_eos,
    } | _shape(ask)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed % (1 << 63)
    if request.guide:
        params["json_schema"] = request.guide
    return {
        "input_ids": list(request.token_ids),
        "rid": str(request.request_id),
        "sampling_params": params,
        "cache_salt": ask.salt,
        "session_id": request.session_id,
        "stream": True,
    }


def _shape(ask: EngineRequest) -> dict[str, Any]:
    """Return the parameters that shape the distribution; none of a usual request."""
    sampling = ask.request.sampling
    if not sampling.shapes:
        return {}
    left = max(0, sampling.min_tokens - ask.request.resumed_tokens)
    return {
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_new_tokens": min(left, ask.max_tokens),
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
    }


def score_body(ask: EngineRequest) -> dict[str, Any]:
    """Return the body of ``POST /generate`` for the log-probabilities of tokens."""
    return generate_body(ask) | {
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": list(dict.fromkeys(ask.request.score_token_ids)),
        "stream": False,
    }


def counts_of_meta(meta: dict[str, Any]) -> Counts:
    """Return the token counts in ``meta_info``, with cached tokens by source."""
    cached = whole(meta.get("cached_tokens"))
    details = meta.get("cached_tokens_details")
    details = details if isinstance(details, dict) else {}
    host, storage = whole(details.get("host")), whole(details.get("storage"))
    hits = HitTokens(l1=max(0, cached - host - storage), l2=host, l3=storage)
    return Counts(whole(meta.get("prompt_tokens")), whole(meta.get("completion_tokens")), hits)
