"""Choice of the door for each kind of engine."""

from __future__ import annotations

from tierkv.integrations.remote.config import EngineKind, RemoteConfig
from tierkv.integrations.remote.door import EngineDoor
from tierkv.integrations.remote.http import EngineHttp
from tierkv.integrations.remote.openai_http import OpenAiDoor
from tierkv.integrations.remote.sglang_http import SglangDoor
from tierkv.integrations.remote.vllm_http import VllmDoor


def open_door(config: RemoteConfig) -> EngineDoor:
    """Return the door to an engine, not yet connected.

    Raises:
        ConfigError: the engine's URL can't be used.
    """
    http = EngineHttp(
        config.url.rstrip("/").removesuffix("/v1"),
        api_key=config.api_key,
        connect_timeout_s=config.connect_timeout_s,
        idle_timeout_s=config.idle_timeout_s,
    )
    match config.kind:
        case EngineKind.VLLM:
            return VllmDoor(http, served=config.served)
        case EngineKind.SGLANG:
            return SglangDoor(http, served=config.served)
        case EngineKind.OPENAI:
            return OpenAiDoor(http, served=config.served)
