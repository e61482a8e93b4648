"""A progress bar for the AI calls of a running statement, on standard error.

The session reports the number of finished calls. The bar appears on a terminal and stays silent in
a pipe. The bar never affects the statement.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tierkv.dbfront.contracts import Notice
from tierkv.dbfront.sql_session import SqlSession

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def make_bar(console: Console | None = None) -> Progress:
    """Return the progress bar for all long operations of this package."""
    # A pipe shows no bar and should not wait for the import of rich.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console or Console(stderr=True),
        transient=True,
    )


class StatementBar:
    """Shows calls done and calls known of one session while the block runs.

    ``on_notice`` receives, on the event loop, the notices of the statement before its rows.
    """

    def __init__(
        self,
        session: SqlSession,
        *,
        label: str = "AI calls",
        enabled: bool = True,
        on_notice: Callable[[Notice], None] | None = None,
    ) -> None:
        self._session = session
        self._label = label
        self._progress = make_bar() if enabled and sys.stderr.isatty() else None
        self._task: Any = None
        self._on_notice = on_notice

    def __enter__(self) -> StatementBar:
        if self._progress is not None:
            self._progress.start()
        self._session.on_progress = self._show
        return self

    def _show(self, progress: Any) -> None:
        if progress.notice is not None and self._on_notice is not None:
            self._on_notice(progress.notice)
        if self._progress is None:
            return
        if self._task is None:
            self._task = self._progress.add_task(self._label, total=progress.calls_total)
        self._progress.update(self._task, completed=progress.calls_done, total=progress.calls_total)

    def __exit__(self, *exc: object) -> None:
        self._session.on_progress = None
        if self._progress is not None:
            self._progress.stop()
