"""One line of what ``tierkv doctor`` found; a value.

Made by the checks in tierkv/commands/doctor.py and tierkv/commands/doctor_paths.py.
"""

from __future__ import annotations

from dataclasses import dataclass

OK, MISSING, OPTIONAL = "ok", "missing", "optional"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``cure`` says what to do unless ``state`` is ok."""

    subject: str
    state: str
    found: str
    cure: str = ""
