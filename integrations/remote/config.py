"""What a compute node is told about the engine that answers for it.

Made by tierkv/parts/engine_part.py out of the ``engine`` settings; nothing here reads
configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tierkv.kvcore.ids import HostId, NodeId
from tierkv.kvcore.node import NodeRole


class EngineKind(StrEnum):
    """What kind of server answers."""

    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI = "openai"
    """Any server with OpenAI's API; it gets text and says nothing of its cache."""


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """One engine and the node that stands for it.

    Attributes:
        node_id: the node's name.
        host: its machine.
        role: what requests it takes.
        kind: what kind of server the engine is.
        url: where the engine listens, without ``/v1``.
        api_key: what it wants in its Authorization header; empty: nothing.
        served: what the engine calls the model; empty: the first it lists.
        model_name: what requests to TierKV call the model; empty: as the engine does.
        model_folder: its files here, for tokenizer and layout; empty: where the engine says.
        dtype: element type of the engine's KV; empty: the model's own.
        max_requests: requests it is given at a time.
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
