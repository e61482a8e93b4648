"""JSON values whose numbers keep every digit, for arguments and answers that are only passed on.

Python's floats hold 17 digits; a DECIMAL of a row may have 38. Two prices that differ only in the
last digit are two questions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self


class ExactNumber(float):
    """A number with a fraction or exponent, written again exactly as read."""

    text: str

    def __new__(cls, text: str) -> Self:
        """Keep the text with the number."""
        number = super().__new__(cls, text)
        number.text = text
        return number


def exact_value(text: str) -> Any:
    """Read JSON.

    Raises:
        ValueError: the text is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text, parse_float=ExactNumber)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def exact_argument(text: str) -> Any:
    """Read JSON whose texts will be sent.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or can't be encoded as UTF-8.
    """
    value = exact_value(text)
    if "\\ud" in text.lower():
        try:
            exact_text(value).encode()
        except UnicodeEncodeError:
            raise ValueError("it has one half of a character, such as \\ud800 alone") from None
    return value


def exact_text(value: Any, *, comma: str = ",", colon: str = ":") -> str:
    """Write JSON, by default in compact form.

    Raises:
        ValueError: the value is nested too deeply.
    """
    try:
        return _written(value, comma, colon)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _written(value: Any, comma: str, colon: str) -> str:
    if isinstance(value, ExactNumber):
        return value.text
    if isinstance(value, Mapping):
        items = (
            f"{_scalar(str(key))}{colon}{_written(item, comma, colon)}"
            for key, item in value.items()
        )
        return f"{{{comma.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"[{comma.join(_written(item, comma, colon) for item in value)}]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
