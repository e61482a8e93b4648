"""Overhead of the front per call: distinct AI calls per second with an instant model.

Run ``python -m bench.front_overhead``. A statement makes one distinct call per row, after a few
rows that do not count. The front is the production code: plan, tokens, block keys, directory,
routing and gRPC. Only the compute nodes are stubs, which answer each request at once with one
token. Ways: N nodes in this process; N nodes in another process over gRPC, packed (``grpc``); and
the same with a message per call and per token (``rpc``), as nodes of earlier versions speak. Ways
take turns. With one node there is no choice, so block keys and the directory are not needed. Not
contained: computing, loading, a network. For comparison, the engine alone runs over the same rows,
and the tokenizer alone encodes the same prompts one by one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from tokenizers import Tokenizer

from bench.report import Report, finish, parse_arguments
from tierkv.compute.client import ComputeClient
from tierkv.compute.grpc_client import GrpcComputeClient
from tierkv.compute.service import serve_node
from tierkv.dbfront.contracts import ClientInfo
from tierkv.dbfront.databases.duckdb_engine import DuckDbConfig
from tierkv.dbfront.generation.generation import Generation
from tierkv.dbfront.sql_session import SqlSession
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

    def __init__(self, name: str = "instant") -> None:
        layout = BlockLayout(6, 2, 32, KvDtype.FLOAT32, 64)
        folder = str(model_folder(ComputeSettings()))
        model = ModelInfo("instant", folder, "0", layout, 4096, (2,), "LlamaForCausalLM", 1)
        self._info = NodeInfo(
            NodeId(name), Incarnation(1), NodeRole.COMPUTE, HostId(name), models=(model,)
        )

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        """Answer."""
        yield GenerateEvent(
            (100,), FinishReason.STOP, Usage(len(request.token_ids), 1), node_id=self._info.node_id
        )

    async def cancel(self, request_id: RequestId) -> bool:
        """Find nothing to cancel."""
        return False

    async def describe(self) -> tuple[NodeInfo, NodeReport]:
        """Say who this is."""
        return self._info, NodeReport()

    def info(self) -> NodeInfo:
        """Say who this is."""
        return self._info

    def report(self) -> NodeReport:
        """Report no load."""
        return NodeReport()

    def set_control_address(self, address: str) -> None:
        """Need no address."""

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
    rows, rounds = (500, 1) if arguments.quick else (4_000, 3)
    asyncio.run(measure_ways(report, rows=rows, rounds=rounds, seed=arguments.seed))
    finish(report, arguments.format)


@asynccontextmanager
async def instant_server(clients: Sequence[ComputeClient] = ()) -> AsyncIterator[DuckDbSqlServer]:
    """Start a front with these compute nodes; by default one InstantNode in this process."""
    meta = LocalMeta()
    view = ClusterView(meta=meta, fixed=clients or [InstantNode()])
    dispatcher = Dispatcher(view, meta=meta)
    await dispatcher.start()
    server = DuckDbSqlServer(
        DuckDbConfig(), Generation(dispatcher), session_defaults={"tierkv.max_calls": "0"}
    )
    yield server
    await server.close()
    await dispatcher.stop()
    await meta.close()


def _serve_nodes(count: int, pipe: Connection) -> None:
    """Serve instant nodes in this process until the pipe closes."""

    async def serve() -> None:
        nodes = [InstantNode(f"instant{number}") for number in range(count)]
        bound = [await serve_node(node, "127.0.0.1:0") for node in nodes]
        pipe.send([one.address for one in bound])
        await asyncio.to_thread(pipe.poll, None)

    with suppress(EOFError, KeyboardInterrupt):
        asyncio.run(serve())


@asynccontextmanager
async def _remote_nodes(count: int, *, packed: bool) -> AsyncIterator[list[ComputeClient]]:
    """Start instant nodes in another process; yield a client of each."""
    context = multiprocessing.get_context("spawn")  # A process with gRPC must not fork.
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_nodes, args=(count, theirs), daemon=True)
    process.start()
    clients = [GrpcComputeClient(address) for address in await asyncio.to_thread(ours.recv)]
    for client in () if packed else clients:
        client._calls = None  # As if the node had answered that it knows no packs.
    try:
        yield list(clients)
    finally:
        for client in clients:
            await client.close()
        process.kill()
        process.join()


async def measure_ways(report: Report, *, rows: int, rounds: int, seed: int) -> None:
    """Report the calls per second of each way, and their ratios; ways take turns."""
    ways = [(kind, nodes) for kind in ("inproc", "rpc", "grpc") for nodes in (1, 2, 8)]
    async with AsyncExitStack() as stack:
        sessions = {}
        for kind, nodes in ways:
            clients: list[ComputeClient] = [InstantNode(f"instant{n}") for n in range(nodes)]
            if kind != "inproc":
                remote = _remote_nodes(nodes, packed=kind == "grpc")
                clients = await stack.enter_async_context(remote)
            server = await stack.enter_async_context(instant_server(clients))
            session = sessions[kind, nodes] = await server.open_session(ClientInfo())
            await _fill(session, rows * rounds + rows // 10, seed)
            await _ask(session, 0, rows // 10)  # Connects, and makes what is made once.
        took: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
        rng = random.Random(seed)
        for number in range(rounds):
            for way in rng.sample(ways, len(ways)):
                first = rows // 10 + number * rows
                took[way].append(await _time(_ask(sessions[way], first, first + rows)))
        engine_s = await _time(
            sessions["inproc", 1].execute("SELECT count(DISTINCT md5(note)) FROM t")
        )
        lone = {}
        for way in (("inproc", 1), ("grpc", 1)):
            await _ask_alone(sessions[way])
            lone[way] = statistics.median(
                [await _time(_ask_alone(sessions[way])) for _ in range(30)]
            )
        for session in sessions.values():
            await session.close()
    report.add("rows", rows)
    for (kind, nodes), seconds in took.items():
        report.add(f"{kind}_{nodes}_nodes_calls_per_s", rows / statistics.median(seconds))
    for nodes in (1, 2, 8):
        pairs = zip(took["rpc", nodes], took["grpc", nodes], strict=True)
        ratio = statistics.median(rpc / packed for rpc, packed in pairs)
        report.add(f"grpc_{nodes}_nodes_of_rpc", ratio)
    encode_us = _encode_s(rows, seed) / rows * 1e6
    call_us = statistics.median(took["inproc", 1]) / rows * 1e6
    report.add("encode_alone_us", encode_us)
    report.add("inproc_1_nodes_call_us", call_us)
    report.add("inproc_1_nodes_call_of_encode", call_us / encode_us)
    report.add("engine_alone_us", engine_s / (rows * rounds) * 1e6)
    report.add("lone_call_inproc_ms", lone["inproc", 1] * 1e3)
    report.add("lone_call_grpc_ms", lone["grpc", 1] * 1e3)


async def _fill(session: SqlSession, rows: int, seed: int) -> None:
    await session.execute(
        "CREATE TABLE t AS SELECT i, repeat('the customer wrote a note about the product. ', 10)"
        f" || i || ' of {seed}' AS note FROM range({rows}) r(i)"
    )


async def _ask(session: SqlSession, first: int, stop: int) -> None:
    await session.execute(
        f"SELECT count(ai_generate(note)) FROM t WHERE i >= {first} AND i < {stop}"
    )


async def _ask_alone(session: SqlSession) -> None:
    await session.execute(f"SELECT ai_generate('hello {uuid.uuid4()}')")


def _encode_s(rows: int, seed: int) -> float:
    """Return the seconds of encoding the prompts one by one."""
    folder = Path(model_folder(ComputeSettings()))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    note = "the customer wrote a note about the product. " * 10
    began = time.perf_counter()
    for number in range(rows):
        tokenizer.encode(f"{note}{number} of {seed}")
    return time.perf_counter() - began


async def measure(report: Report, rows: int) -> None:
    """Report the front's cost of a distinct call with one node in this process."""
    async with instant_server() as server:
        session = await server.open_session(ClientInfo())
        await _fill(session, rows + 200, 1)
        await _ask(session, rows, rows + 200)
        engine_s = await _time(session.execute("SELECT count(DISTINCT md5(note)) FROM t"))
        calls_s = await _time(_ask(session, 0, rows))
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
