"""Overhead of the front per call: distinct AI calls per second with an instant model.

Run ``python -m bench.front_overhead``. A statement makes one distinct call per row. Tokenisation,
block keys, routing and dispatch are the production code; only the compute node is a stub with an
immediate answer of one token per request. For comparison, the engine alone runs over the same rows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from bench.report import Report, finish, parse_arguments
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.generation.generation import Generation
from tierkv.dbfront.statement.server import DuckDbSqlServer
from tierkv.kvcore.ids import HostId, Incarnation, NodeId, RequestId
from tierkv.kvcore.layout import BlockLayout, KvDtype
from tierkv.kvcore.node import ModelInfo, NodeInfo, NodeReport, NodeRole
from tierkv.kvcore.request import FinishReason, GenerateEvent, GenerateRequest, Usage
from tierkv.metaserver.local import LocalMeta
from tierkv.parts.served_models import model_folder
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.nodes.cluster_view import ClusterView
from tierkv.settings import ComputeSettings


class InstantNode:
    """A compute node that answers every request immediately with token 100."""

    def __init__(self) -> None:
        layout = BlockLayout(6, 2, 32, KvDtype.FLOAT32, 64)
        folder = str(model_folder(ComputeSettings()))
        model = ModelInfo("instant", folder, "0", layout, 4096, (2,), "LlamaForCausalLM", 1)
        self._info = NodeInfo(
            NodeId("instant"), Incarnation(1), NodeRole.COMPUTE, HostId("here"), models=(model,)
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        """Answer."""
        yield GenerateEvent(
            (100,), FinishReason.STOP, Usage(len(request.token_ids), 1), node_id="instant"
        )

    async def cancel(self, request_id: RequestId) -> bool:
        """Find nothing to cancel."""
        return False

    async def describe(self) -> tuple[NodeInfo, NodeReport]:
        """Say who this is."""
        return self._info, NodeReport()

    async def drop_cache(self) -> int:
        """Hold nothing."""
        return 0

    async def prefetch(self, request: GenerateRequest) -> int:
        """Hold nothing."""
        return 0

    async def close(self) -> None:
        """Do nothing."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = parse_arguments(__doc__ or "", argv)
    report = Report("front overhead")
    asyncio.run(measure(report, rows=2_000 if arguments.quick else 10_000))
    finish(report, arguments.format)


@asynccontextmanager
async def instant_server() -> AsyncIterator[DuckDbSqlServer]:
    """Start a front whose only compute node is an InstantNode."""
    meta = LocalMeta()
    dispatcher = Dispatcher(ClusterView(meta=meta, fixed=[InstantNode()]), meta=meta)
    await dispatcher.start()
    server = DuckDbSqlServer(
        DuckDbConfig(), Generation(dispatcher), session_defaults={"tierkv.max_calls": "0"}
    )
    yield server
    await server.close()
    await dispatcher.stop()
    await meta.close()


async def measure(report: Report, rows: int) -> None:
    """Report the front's cost of a distinct call."""
    async with instant_server() as server:
        session = await server.open_session(ClientInfo())
        note = "repeat('the customer wrote a note about the product. ', 10) || i"
        await session.execute(f"CREATE TABLE t AS SELECT i, {note} AS note FROM range({rows}) r(i)")
        engine_s = await _time(session.execute("SELECT count(DISTINCT md5(note)) FROM t"))
        calls_s = await _time(session.execute("SELECT count(ai_generate(note)) FROM t"))
        report.add("rows", rows)
        report.add("distinct_calls_per_s", rows / calls_s)
        report.add("overhead_per_call_us", (calls_s - engine_s) / rows * 1e6)
        stats = session.last_ai_stats
        report.add("prompt_tokens_per_call", stats.prompt_tokens / rows)
        report.add("engine_share", stats.engine_s / stats.wall_s)
        await session.close()


async def _time(work: object) -> float:
    started = time.perf_counter()
    await work  # type: ignore[misc]
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
