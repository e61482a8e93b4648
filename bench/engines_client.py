"""The client of bench.engines: asks any OpenAI-compatible server and times the first token.

Prompts are token ids and answers are words that name token ids (bench.engines_model), so the client
works with any server. The client waits on a plain socket; no library's work is in the time.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.engines_model import token_of

TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer.

    Attributes:
        tokens: all token ids.
        ttft_s: from sending the request to the first token.
        total_s: from sending the request to the end.
        cached_tokens: prompt tokens not computed, as reported by the server; None without a report.
    """

    tokens: tuple[int, ...]
    ttft_s: float
    total_s: float
    cached_tokens: int | None


def ask(port: int, model: str, prompt: Sequence[int], new_tokens: int) -> Answer:
    """Ask for exactly ``new_tokens`` greedy tokens after a prompt.

    Raises:
        RuntimeError: the server refused or answered with fewer tokens.
    """
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": new_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.connect()
        return _ask(connection, data, new_tokens)
    finally:
        connection.close()


def _ask(connection: http.client.HTTPConnection, data: str, new_tokens: int) -> Answer:
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != http.client.OK:
        raise RuntimeError(f"{response.status}: {response.read(2_000).decode(errors='replace')}")
    first_s, words, usage = 0.0, "", dict[str, Any]()
    for event in _events(response):
        for choice in event.get("choices") or ():
            if choice["text"] and not first_s:
                first_s = time.perf_counter() - began
            words += choice["text"]
        usage = event.get("usage") or usage
    total_s = time.perf_counter() - began
    tokens = tuple(map(token_of, words.split()))
    if len(tokens) != new_tokens:
        raise RuntimeError(f"{len(tokens)} tokens instead of {new_tokens}: {words[:200]!r}")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(tokens, first_s, total_s, details.get("cached_tokens"))


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in iter(response.readline, b""):
        told = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and told != b"[DONE]":
            event: dict[str, Any] = json.loads(told)
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            yield event
