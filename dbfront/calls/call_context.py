"""The fields of an AI call's context as lines of its prompt.

Pure. Used where a row's call becomes messages. A field is one ``key: value`` entry; whatever stands
in a key or a value, the text can be read back in one way only, so no value can pass for a field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final

_INDENT: Final = "  "


def render_context(fields: Mapping[str, str], order: Iterable[str]) -> str:
    """Write fields as lines, one after the other in the order given; no fields are no text.

    Lines of a value behind its first are indented by two spaces, and a key that could be taken for
    something else is written as a JSON string. Equal fields in equal order give equal text, others
    never do.

    Args:
        fields: values by key.
        order: keys of ``fields``, each once.
    """
    return "\n".join(f"{_key(name)}: {_value(fields[name])}" for name in order)


def _key(name: str) -> str:
    plain = name == name.strip() and ":" not in name and len(name.splitlines()) == 1
    return name if plain and name[0] != '"' else json.dumps(name)


def _value(value: str) -> str:
    lines = value.splitlines(keepends=True)
    if lines and lines[-1].splitlines()[0] != lines[-1]:
        lines.append("")  # A break at the end begins a line, too.
    return _INDENT.join(lines)
