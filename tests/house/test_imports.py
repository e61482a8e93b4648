"""Every room imports alone, from our tree, without the heavy libraries it has no business with."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from tierkv.processes import start_order

ROOT = Path(__file__).parents[2]
HEAVY = (
    *("torch", "grpc", "duckdb", "fastapi", "sqlglot", "psycopg", "pyverbs", "transformers"),
    *("tierkv.parts.parts", "tierkv.storage.l4", "tierkv.compute.node"),
)

MAY_LOAD = {
    "tierkv.kvcore.request": (),
    "tierkv.kvcore.node": (),
    "tierkv.kvwire.convert": (),
    "tierkv.sql": (),
    "tierkv.dmp.pool_node": (),
    "tierkv.dmp.node.node": (),
    "tierkv.storage.modelfiles.model_folder": (),
    "tierkv.metaserver.client": (),
    "tierkv.metaserver.directory.directory": (),
    "tierkv.scheduler.requests.state": (),
    "tierkv.scheduler.dispatcher": (),
    "tierkv.compute.batching.batcher": (),
    "tierkv.compute.client": (),
    "tierkv.integrations.pool_door": (),
    "tierkv.cli": (),
    "tierkv.shell.sql_shell": ("duckdb", "sqlglot"),
    "tierkv.config": (),
}


@pytest.mark.parametrize("module", sorted(MAY_LOAD))
def test_module_imports_alone_and_light(module: str) -> None:
    code = (
        f"import sys, {module} as m; print(m.__file__); "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    file, loaded = done.stdout.strip().splitlines()
    assert Path(file).is_relative_to(ROOT)
    assert [name for name in eval(loaded) if name not in MAY_LOAD[module]] == []


def test_modules_that_roles_import_by_name_exist() -> None:
    named = [*start_order._ENGINE, *start_order._COMPUTE, *chain(*start_order._PARTS.values())]
    assert [name for name in named if importlib.util.find_spec(name) is None] == []
