"""The worker processes of a front, and questions between workers.

A front with several workers (tierkv/processes/worker_group.py) runs each worker as a process, and
the kernel gives each new connection to a worker. A request of a client may therefore concern other
workers: a view of all sessions, a cancel of a session, statistics in memory. Each worker listens on
a Unix socket in the front's private folder and answers one question per connection, as a line of
JSON. Workers that are away or slow are left out of an answer, without an error.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

log = logging.getLogger("tierkv.workers")

ANSWER_S: Final = 5.0
"""Longest wait for another worker, whose event loop may be busy for a moment."""

Answer = Callable[[dict[str, Any]], Awaitable[Any]]
"""Answers one kind of question; details and answer are values of JSON."""


class Siblings:
    """The workers of a front, as seen by one of them; alone by default.

    Attributes:
        index: number of this worker, from 0.
        count: number of workers.
        folder: the front's private folder; None alone.
        answers: by kind of question; filled by the doors before ``start``.
    """

    def __init__(self, folder: Path | None = None, *, index: int = 0, count: int = 1) -> None:
        """Open nothing.

        Args:
            folder: private folder of the front; needed with several workers.
            index: see the attribute.
            count: see the attribute.
        """
        self.index = index
        self.count = count
        self.answers: dict[str, Answer] = {}
        self.folder = folder
        self._descriptor = -1
        self._server: asyncio.Server | None = None

    @property
    def shared(self) -> bool:
        """Return True if other workers listen on the same ports."""
        return self.count > 1

    async def start(self) -> None:
        """Answer the other workers from now on; does nothing alone.

        Raises:
            OSError: the folder is unusable.
        """
        if not self.shared:
            return
        assert self.folder is not None, "workers share a folder"
        self._descriptor = os.open(self.folder, os.O_DIRECTORY | os.O_CLOEXEC)
        self._server = await asyncio.start_unix_server(self._serve, self._socket(self.index))

    async def stop(self) -> None:
        """Stop answering."""
        if self._server is not None:
            self._server.close()
            self._server = None
            os.close(self._descriptor)
            self._descriptor = -1

    async def ask_all(self, question: str, **details: Any) -> list[Any]:
        """Return the answers of the other workers that answer in time; empty alone."""
        if self._server is None:
            return []
        others = (number for number in range(self.count) if number != self.index)
        asked = await asyncio.gather(*(self._ask(one, question, details) for one in others))
        return [found[0] for found in asked if found]

    async def any_does(self, question: str, **details: Any) -> bool:
        """Return True if any other worker answers yes."""
        return any(await self.ask_all(question, **details))

    def _socket(self, worker: int) -> str:
        # A socket's address has at most 107 bytes; through the descriptor any folder fits.
        return f"/proc/self/fd/{self._descriptor}/{worker}.sock"

    async def _ask(self, worker: int, question: str, details: dict[str, Any]) -> list[Any]:
        """Return the answer in a list; empty without an answer."""
        line = json.dumps({"question": question, "details": details}).encode() + b"\n"
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._socket(worker))
                try:
                    writer.write(line)
                    data = await reader.read()
                finally:
                    writer.close()
            return [json.loads(data)]
        except (OSError, TimeoutError, ValueError) as error:
            log.debug("worker %d did not answer %s: %s", worker, question, error)
            return []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = json.loads(await reader.readline())
            answer = await self.answers[asked["question"]](asked["details"])
            writer.write(json.dumps(answer).encode())
            await writer.drain()
        except ConnectionError:
            log.debug("another worker left before its answer")
        except Exception:
            log.exception("a question of another worker could not be answered")
        finally:
            writer.close()
