"""Clients and agents of other people over REST: vendors' SDKs, LangChain, LiteLLM, two frameworks.

``make test-clients`` installs them. Each program of ``programs/`` runs against a cluster with the
demo model and prints a line per step.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.test_clients import PROGRAMS, PYTHON
from tests.fix_cluster import Cluster

pytestmark = [pytest.mark.clients, pytest.mark.timeout(180)]

CITY = "Vienna"
CALL = ["lookup", ["kind"]]
EXPECTED: dict[str, dict[str, Any]] = {
    "rest_langchain.py": {
        f"{name} {what}": got
        for name in ("openai", "anthropic")
        for what, got in {
            "answer": CITY,
            "stream": CITY,
            "calls": [CALL],
            "after the call": True,
            "structure": "City",
        }.items()
    }
    | {"embedding": 128},
    "rest_litellm.py": {
        f"{name} {what}": got
        for name in ("openai", "anthropic")
        for what, got in {
            "first": CITY,
            "second": CITY,
            "cached": True,
            "stream": CITY,
            "call": CALL,
        }.items()
    }
    | {"embedding": 128},
    "rest_sdks.py": {
        "openai parsed": "City",
        "openai tool stream": True,
        "openai tool arguments": "City",
        "openai resumed": True,
        "openai counted": True,
        "openai refused": "input",
        "anthropic stream": CITY,
        "anthropic stop": "end_turn",
        "anthropic parsed": "City",
        "anthropic runner": "end_turn",
        "anthropic models": [["tierkv-demo", "tierkv-demo"]],
        "anthropic refused": True,
    },
    "rest_agents.py": {
        "openai-agents chat calls": 1,
        "openai-agents chat answers": True,
        "openai-agents responses calls": 1,
        "openai-agents responses answers": True,
        "pydantic-ai answers": CITY,
        "pydantic-ai type": "City",
    },
}


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    return start_cluster("--compute", "1")


@pytest.mark.parametrize("program", EXPECTED)
def test_a_program_of_a_rest_client(program: str, cluster: Cluster) -> None:
    done = subprocess.run(
        [PYTHON, str(PROGRAMS / program)],
        env=os.environ | {"TIERKV_URL": f"http://127.0.0.1:{cluster.http_port}"},
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"what"')]
    assert {line["what"]: line["got"] for line in told} == EXPECTED[program]
