"""The lines of `tierkv connect`, read by vLLM's own parser and run by a shell."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.fix_cluster import free_port, wait_for
from tests.fix_dmp import Rig
from tests.fix_engine_model import copy_demo_model
from tests.fix_engine_nodes import Process
from tierkv.dmp.client.pool import Pool
from tierkv.integrations.launch import EngineRole, Events, LaunchKind, LaunchWish, plan_launch
from tierkv.integrations.vllm.connector import TierKvConnector

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

POOL = {"pool": "127.0.0.1:7401"}


def wish(model: str = "org/model", **changes: Any) -> LaunchWish:
    return LaunchWish(LaunchKind.VLLM, model, changes.pop("pool", POOL), **changes)


def read(asked: LaunchWish) -> AsyncEngineArgs:
    """Return what vLLM makes of a line."""
    argv = plan_launch(asked).argv
    assert argv[:2] == ("vllm", "serve")
    told = make_arg_parser(FlexibleArgumentParser()).parse_args(argv[2:])
    assert (told.model_tag, told.enable_prompt_tokens_details) == (asked.model, True)
    return AsyncEngineArgs.from_cli_args(told)


@pytest.mark.parametrize("role", list(EngineRole))
def test_vllm_reads_the_connectors_line(role: EngineRole) -> None:
    args = read(wish(role=role, block_tokens=32, ranks=2, events=Events.LOCAL, events_folder="/x"))
    assert (args.block_size, args.tensor_parallel_size) == (32, 2)
    told = args.kv_transfer_config
    assert isinstance(told, KVTransferConfig)
    assert told.is_kv_producer is (role is not EngineRole.DECODE)
    assert told.is_kv_consumer is (role is not EngineRole.PREFILL)
    assert told.kv_load_failure_policy == "recompute"
    assert KVConnectorFactory.get_connector_class(told) is TierKvConnector
    events = args.kv_events_config
    assert isinstance(events, KVEventsConfig)
    assert (events.publisher, events.endpoint) == ("zmq", "ipc:///x/tierkv-events-8100")


class Line(Process):
    """A line, run by a shell with what a test needs of small and slow machines added."""

    def __init__(self, line: str, log: Path) -> None:
        more = "--enforce-eager --dtype float32 --max-model-len 1024 --num-gpu-blocks-override 64"
        env = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "2",
            "HF_HUB_OFFLINE": "1",
        }
        super().__init__(["sh", "-c", f"exec {line} {more}"], log, env=env)


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def test_a_shell_starts_an_engine_that_keeps_its_blocks_in_the_pool(
    tmp_path: Path, make_node: Callable[..., Rig]
) -> None:
    model = copy_demo_model(tmp_path / "a model")
    pool = make_node(capacity_bytes=64 << 20, extent_bytes=1 << 20).server.address
    asked = wish(
        str(model), pool={"pool": pool}, port=free_port(),
        events=Events.LOCAL, events_folder=str(tmp_path), as_module=True,
    )  # fmt: skip
    launch = plan_launch(asked)
    engine = Line(launch.line(), tmp_path / "engine.log")
    try:
        body = {"model": str(model), "prompt": list(range(300, 500)), "max_tokens": 4}

        def answers() -> bool:
            engine.check_alive()
            try:
                return bool(ask(launch.url, body)["choices"])
            except OSError:
                return False

        wait_for(answers, what=f"the engine answers: {engine.log}", deadline_s=300.0)
        with Pool.connect(pool) as client:

            def stored() -> bool:
                answers()
                (member,) = client.stats().members
                # 200 tokens are three blocks of 64; a manifest and the like lie beside them.
                return member.stats is not None and member.stats.memory.write_bytes >= 3 * 64 * 1536

            wait_for(stored, what="its blocks are in the pool", deadline_s=60.0)
        assert Path(launch.events_url.removeprefix("ipc://")).is_socket()
    finally:
        engine.stop()
