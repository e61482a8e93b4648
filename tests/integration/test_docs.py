"""The documentation's examples are run: SQL in one embedded session, Python and curl on a cluster.

Ports in the examples (5433, 8000; 7401 of a pool node that stands alone) are replaced by those of
processes the test starts; see tests/doc_blocks.py for which blocks are run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tierkv
from tests.doc_blocks import PAGES, ROOT, Block, Example, blocks, sql_examples
from tests.fix_cluster import Cluster
from tests.fix_serve_dmp import Alone
from tierkv import dbapi

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SMALL = {"dmp__capacity": "64MiB", "compute__l1_capacity": "32MiB", "compute__threads": 1}
SQL_PAGES = [page for page in PAGES if blocks(page, "sql")]
PYTHON = [block for page in PAGES for block in blocks(page, "python")]
SHELL = [block for page in PAGES for block in blocks(page, "sh run")]


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., Cluster]) -> Cluster:
    return start_cluster()


@pytest.fixture(scope="module")
def pool_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    node = Alone(tmp_path_factory.mktemp("pool"))
    yield node
    node.end()


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Settings for embedded clusters that examples start themselves."""
    small = {f"TIERKV_{key.replace('__', '_').upper()}": str(value) for key, value in SMALL.items()}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | small | {"PATH": path, "PYTHONPATH": str(ROOT)}


def on_cluster(text: str, cluster: Cluster, node: Alone) -> str:
    text = text.replace("5433", str(cluster.pg_port)).replace("8000", str(cluster.http_port))
    return text.replace("7401", node.port)


def run(argv: list[str], environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        argv, env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def database() -> Iterator[dbapi.Connection]:
    with tierkv.connect(**SMALL) as connection:
        yield connection


def test_sql_examples_do_what_the_pages_say(database: dbapi.Connection) -> None:
    for page in SQL_PAGES:
        for example in sql_examples(page):
            check_example(example, database)
    check_rounds(database)


def check_example(example: Example, database: dbapi.Connection) -> None:
    if not example.fails:
        try:
            database.execute(example.sql)
        except dbapi.Error as error:
            pytest.fail(f"{example.where}: {error}\n{example.sql}")
        return
    with pytest.raises(dbapi.Error) as caught:
        database.execute(example.sql)
    assert example.fails in str(caught.value), example.where


def check_rounds(database: dbapi.Connection) -> None:
    """docs/sql.md follows one statement round by round; EXPLAIN ANALYZE must say the same."""
    told = [e.sql for e in sql_examples(ROOT / "docs/sql.md") if "EXPLAIN ANALYZE\nSELECT" in e.sql]
    assert len(told) == 1
    plan = "\n".join(line for (line,) in database.execute(told[0]).fetchall())
    assert "calls 5, distinct 3, errors 0, rounds 3" in plan


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.where)
def test_python_examples_run(
    block: Block,
    cluster: Cluster,
    pool_node: Alone,
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    script = tmp_path / "example.py"
    script.write_text(on_cluster(block.text, cluster, pool_node))
    assert run([sys.executable, "-W", "error", str(script)], environment, tmp_path).strip()


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.where)
def test_shell_examples_run(
    block: Block,
    cluster: Cluster,
    pool_node: Alone,
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    script = "set -euo pipefail\n" + on_cluster(block.text, cluster, pool_node)
    output = run(["bash", "-c", script], environment, tmp_path)
    assert output.strip()
    assert '"error"' not in output, output
