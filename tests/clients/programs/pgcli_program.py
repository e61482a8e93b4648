"""pgcli: all that its completer asks, and queries through its executor."""

from __future__ import annotations

import threading

from pgcli.completion_refresher import CompletionRefresher
from pgcli.pgexecute import PGExecute
from pgspecial.main import PGSpecial
from steps import AI_SQL, DATABASE, HOST, PASSWORD, PORT, USER, step

run = PGExecute(DATABASE, USER, PASSWORD, HOST, str(PORT), dsn="")


def ours(found: object) -> object:
    """Keep what is about the tables that the test made."""
    return sorted(str(row) for row in found if "notes" in str(row) or "lines" in str(row))


def answers(sql: str) -> object:
    """Run a statement as its prompt does."""
    return [
        [list(rows) if rows is not None else None, headers, status]
        for _, rows, headers, status, *_ in run.run(sql, PGSpecial())
    ]


def completed() -> object:
    """Fill the completer as its background thread does."""
    done, seen = threading.Event(), []
    CompletionRefresher().refresh(run, PGSpecial(), lambda new: (seen.append(new), done.set()))
    assert done.wait(60)
    return sorted(
        name for name in seen[0].dbmetadata["tables"]["public"] if name in ("notes", "lines")
    )


for name in ("tables", "table_columns", "foreignkeys"):
    step(name, lambda n=name: ours(getattr(run, n)()))
step("search_path", run.search_path)
step("completer", completed)
step("select", lambda: answers("SELECT id, body FROM notes ORDER BY id LIMIT 2"))
step("ai", lambda: answers(AI_SQL.format(where="id < 4")))
step("error", lambda: answers("SELECT * FROM nowhere"))
for command in (r"\d notes", r"\dt notes", r"\dn public"):
    step(command, lambda c=command: [ours(rows) for rows, *_ in answers(c)])
