"""An engine that weighs loading against computing gives the same tokens, whatever it chooses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.vllm.engine_process import (
    EngineProcess,
    connector,
    prompt,
    tokens_of,
    write_model,
)
from tests.engines.vllm.server_rig import pool_node

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_weighing_changes_no_token(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    node = pool_node(tmp_path)
    plain = EngineProcess(tmp_path / "plain.log", model, None)
    transfer = connector(node.address, load_policy="auto")
    weighing = EngineProcess(tmp_path / "weighing.log", model, transfer)
    try:
        # Twice what the engine's own cache holds, so that each round finds them in the pool only.
        prompts = [prompt(f"weighed-{n}", n) for n in (900, 1_000, 1_100, 1_200, 1_300, 700)]
        expected = tokens_of(plain.ready().generate(prompts))
        weighing.ready().reach_pool()
        for _ in range(6):
            for ids, wanted in zip(prompts, expected, strict=True):
                assert tokens_of(weighing.generate([ids])) == [wanted]
            weighing.settle()
        assert weighing.count("hit_tokens") > 0, "what was not measured yet is loaded"
        assert weighing.count("load_failed_tokens") == 0
    finally:
        plain.kill()
        weighing.kill()
        node.end()
