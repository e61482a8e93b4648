"""An engine's HTTP server on loopback, for tests of the doors to engines.

Bodies and replies have the forms of vLLM, SGLang and OpenAI; tests/engines/remote and
tests/integration/test_engine_openai.py ask real servers. What it answers is the test's to say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from tierkv.integrations.remote.door import EngineDoor, EngineKind, RemoteConfig
from tierkv.kvcore.ids import HostId, NodeId
from tierkv.kvcore.node import NodeRole
from tierkv.parts.engine_part import open_door

Body = dict[str, Any]
KEY = "key-of-engine"

_VLLM_PAGE = """
process_start_time_seconds 1.5e+09
vllm:num_requests_running {running}
vllm:kv_cache_usage_perc 0.25
vllm:cache_config_info{{block_size="16",num_gpu_blocks="64",cache_dtype="auto"}} 1.0
"""
_SGLANG_PAGE = "sglang:num_running_reqs {running}\nsglang:token_usage 0.25\n"
_SGLANG_SERVER = {"page_size": 16, "max_total_num_tokens": 1024, "version": "0.5"}


class PlayedEngine:
    """A server of one kind that serves model ``m``.

    Attributes:
        answer_of: the tokens of an answer, from the prompt and the body; for text, bytes.
        repeated: a text engine writes each character so often.
        chance_of: log-probability of a token.
        refusal: status and message of the reply to a request for an answer; None: an answer.
        breaks_after: the connection breaks after so many tokens; None: never.
        turns: each token takes one; None: tokens come at once.
        key: the key that requests need; empty: none.
        running: number of requests that it reports.
        asked: paths of the requests so far.
        began: set by a request for an answer.
        left: set when a client left an answer early.
    """

    def __init__(self, kind: EngineKind) -> None:
        self.kind = kind
        self.answer_of: Callable[[Sequence[int], Body], Sequence[int]] = lambda ids, body: b"abc"
        self.repeated = 1
        self.chance_of: Callable[[int], float] = lambda token: -1.0 - token / 100
        self.refusal: tuple[int, str] | None = None
        self.breaks_after: int | None = None
        self.turns: asyncio.Semaphore | None = None
        self.key = ""
        self.running = 0
        self.asked: list[str] = []
        self.began, self.left = asyncio.Event(), asyncio.Event()
        self.url = ""
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            server.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)
            await server.wait_closed()

    def door(self) -> EngineDoor:
        """Open the product's door to this engine."""
        return open_door(self.config())

    def config(self) -> RemoteConfig:
        node = (NodeId("n"), HostId("h"), NodeRole.COMPUTE)
        return RemoteConfig(*node, self.kind, self.url, api_key=KEY)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._handle(reader, writer)
        finally:
            self._serving.discard(task)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        path = head.split(" ", 2)[1]
        self.asked.append(path)
        if self.key and fields.get("authorization") != f"bearer {self.key}":
            await _reply(writer, {"error": {"message": "Unauthorized"}}, status=401)
        elif head.startswith("GET"):
            await _reply(writer, self._described(path))
        else:
            await self._answer(json.loads(body), reader, writer)

    def _described(self, path: str) -> Body | str:
        models = [{"id": "m", "root": "/models/m", "max_model_len": 4_096}]
        page = _VLLM_PAGE if self.kind is EngineKind.VLLM else _SGLANG_PAGE
        return {
            "/v1/models": {"data": models},
            "/metrics": page.format(running=self.running),
            "/version": {"version": "0.32"},
            "/model_info": {"model_path": "/models/m"},
            "/server_info": _SGLANG_SERVER,
        }[path]

    async def _answer(
        self, body: Body, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.began.set()
        prompt = body.get("prompt") or body.get("input_ids") or body["messages"][-1]["content"]
        ids = prompt.encode() if isinstance(prompt, str) else prompt
        if self.refusal is not None:
            status, message = self.refusal
            await _reply(writer, {"error": {"message": message}}, status=status)
        elif not body.get("stream"):
            await _reply(writer, self._scored(ids, body))
        else:
            writing = asyncio.create_task(self._stream(ids, body, writer))
            leaving = asyncio.create_task(reader.read(1))
            try:
                await asyncio.wait([writing, leaving], return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not writing.done():
                    self.left.set()
                for task in (writing, leaving):
                    task.cancel()
                await asyncio.gather(writing, leaving, return_exceptions=True)

    async def _stream(self, ids: Sequence[int], body: Body, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        tokens = list(self.answer_of(ids, body))
        for count in range(1, len(tokens) + 1):
            if self.turns is not None:
                await self.turns.acquire()
            if self.breaks_after == count - 1:
                return
            ended = "length" if count == len(tokens) else None
            await _event(writer, self._piece(ids, tokens[:count], ended, chat="messages" in body))
        if self.kind is not EngineKind.SGLANG:
            await _event(writer, {"choices": [], "usage": _usage(len(ids), len(tokens))})
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()

    def _piece(
        self, ids: Sequence[int], tokens: list[int], ended: str | None, *, chat: bool
    ) -> Body:
        """An event with the newest token; SGLang sends all tokens so far."""
        if self.kind is EngineKind.SGLANG:
            reason = {"type": ended} if ended else None
            return {"output_ids": tokens, "meta_info": _meta(len(ids), len(tokens), reason)}
        choice: Body = {"finish_reason": ended}
        if self.kind is EngineKind.VLLM:
            choice |= {"text": "", "token_ids": tokens[-1:]}
        elif chat:
            choice["delta"] = {"content": chr(tokens[-1]) * self.repeated}
        else:
            choice["text"] = chr(tokens[-1]) * self.repeated
        return {"choices": [choice]}

    def _scored(self, ids: Sequence[int], body: Body) -> Body:
        if self.kind is EngineKind.SGLANG:
            row = [[self.chance_of(t), t, None] for t in body["token_ids_logprob"]]
            return {"meta_info": _meta(len(ids), 1, None) | {"output_token_ids_logprobs": [row]}}
        table = {f"token_id:{t}": self.chance_of(t) for t in body["logprob_token_ids"]}
        choice = {"token_ids": [5], "logprobs": {"top_logprobs": [table]}}
        return {"choices": [choice], "usage": _usage(len(ids), 1)}


def _meta(prompt: int, completion: int, reason: Body | None) -> Body:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "cached_tokens": 2,
        "finish_reason": reason,
    }


def _usage(prompt: int, completion: int) -> Body:
    cached = {"cached_tokens": 2}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return counts | {"prompt_tokens_details": cached}


async def _event(writer: asyncio.StreamWriter, event: Body) -> None:
    writer.write(f"data: {json.dumps(event)}\n\n".encode())
    await writer.drain()


async def _reply(writer: asyncio.StreamWriter, reply: Body | str, *, status: int = 200) -> None:
    text = reply if isinstance(reply, str) else json.dumps(reply)
    head = f"HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {len(text)}\r\n\r\n"
    writer.write((head + text).encode())
    await writer.drain()


@asynccontextmanager
async def playing(kind: EngineKind) -> AsyncIterator[PlayedEngine]:
    """Start an engine and stop it."""
    engine = PlayedEngine(kind)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
