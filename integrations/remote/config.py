"""Settings of a compute node for its engine.

Created by tierkv/parts/engine_part.py from the ``engine`` settings; this module reads no
configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tierkv.kvcore.ids import HostId, NodeId
from tierkv.kvcore.node import NodeRole


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
