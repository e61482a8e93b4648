"""Lines of the audit log: changes of the cluster and refusals, with the user and the time.

Pure values. Written by fronts (tierkv/parts/audit_writer.py) and by the command line, kept by the
meta server as records, shown by the view ``tierkv.audit_log``. A line never has a prompt, a key or
a password.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

RECORD_KIND: Final = "audit"
"""Kind of the records that hold lines (metaserver/client.py::Record)."""

_MOST_CHARS: Final = 300


class Outcome(StrEnum):
    """What became of an action."""

    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One action.

    Attributes:
        at_unix_s: when.
        who: SQL user, tenant, or ``user@host`` of a command line.
        action: what, as ``ALTER AI LIMIT`` or ``tierkv key create``.
        subject: to what: a namespace, a key, a limit's subject.
        outcome: what became of it.
        detail: the options as written, or the reason of a refusal.
        times: how many equal refusals the line stands for.
    """

    at_unix_s: float
    who: str
    action: str
    subject: str
    outcome: Outcome
    detail: str = ""
    times: int = 1

    def record_name(self) -> str:
        """Return a unique name; names sort by time."""
        return f"{int(self.at_unix_s * 1e6):020d}.{secrets.token_hex(4)}"

    def to_json(self) -> str:
        """Return the body of the line's record."""
        cut = {
            name: value[:_MOST_CHARS] if isinstance(value, str) else value
            for name, value in asdict(self).items()
        }
        return json.dumps(cut)


def lines_of(records: Iterable[Any]) -> list[AuditLine]:
    """Return the lines among records, by time; unreadable lines are left out.

    Args:
        records: have ``kind`` and ``body``.
    """
    known = {field.name for field in fields(AuditLine)}
    found = []
    for record in records:
        if record.kind != RECORD_KIND:
            continue
        try:
            told = {k: v for k, v in json.loads(record.body).items() if k in known}
            found.append(AuditLine(**told | {"outcome": Outcome(told["outcome"])}))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return sorted(found, key=lambda line: line.at_unix_s)
