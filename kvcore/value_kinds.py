"""Kinds of values of options and settings: type, bounds, and reading from text.

``from_json`` reads a value of SQL's ``options => {...}``, ``from_text`` reads the text of a SET;
kvcore/call_options.py and sql/settings.py declare options and settings with these kinds. Both
methods raise ValueError with the end of a sentence, such as "must be between 0 and 10". REST reads
the bounds alone, because pydantic checks bodies (dbfront/http/schema.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol


class ValueKind(Protocol):
    """Reads values of one kind.

    1. ``from_json`` and ``from_text`` return equal values for equal meanings.
    2. Both raise ValueError for a value of another kind or out of bounds.
    """

    def from_json(self, value: Any) -> Any: ...

    def from_text(self, text: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Number:
    """A number in [low, high], or in (low, high] with ``above_low``."""

    low: float
    high: float
    above_low: bool = False

    def from_json(self, value: Any) -> float:
        """Read a JSON number."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("must be a number")
        if not self._holds(value):
            raise ValueError(
                f"must be in {'(' if self.above_low else '['}{self.low:g}, {self.high:g}]"
            )
        return float(value)

    def from_text(self, text: str) -> float:
        """Read a number."""
        try:
            number = float(text)
        except ValueError:
            raise ValueError("must be a number") from None
        if self._holds(number):
            return number
        if self.above_low:
            raise ValueError(f"must be above {self.low:g}, up to {self.high:g}")
        raise ValueError(f"must be between {self.low:g} and {self.high:g}")

    def _holds(self, number: float) -> bool:
        return self.low <= number <= self.high and not (self.above_low and number == self.low)


@dataclass(frozen=True, slots=True)
class ShareOrOff:
    """A number between ``low`` and ``high``, both left out; or 0.0, written as 0 or as ``off``."""

    low: float
    high: float

    def from_json(self, value: Any) -> float:
        """Read a JSON number, or ``"off"``."""
        if value == "off":
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError("must be a number or off")
        if value != 0 and not self.low < value < self.high:
            raise ValueError(f"must be above {self.low:g} and below {self.high:g}, or off")
        return float(value)

    def from_text(self, text: str) -> float:
        """Read a number, or ``off`` in any case."""
        if text.lower() == "off":
            return 0.0
        try:
            number = float(text)
        except ValueError:
            raise ValueError("must be a number or off") from None
        return self.from_json(number)


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number in [low, high]; None is no bound."""

    low: int | None = None
    high: int | None = None

    def from_json(self, value: Any) -> int:
        """Read a JSON number without a fraction."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("must be a whole number")
        return self._in_bounds(value)

    def from_text(self, text: str) -> int:
        """Read a whole number."""
        try:
            number = int(text)
        except ValueError:
            raise ValueError("must be a whole number") from None
        return self._in_bounds(number)

    def _in_bounds(self, number: int) -> int:
        low = number if self.low is None else self.low
        high = number if self.high is None else self.high
        if not low <= number <= high:
            raise ValueError(f"must be between {self.low} and {self.high}")
        return number


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false; on or off in a SET."""

    def from_json(self, value: Any) -> bool:
        """Read true or false."""
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value

    def from_text(self, text: str) -> bool:
        """Read on or off."""
        value = _ON_OFF.get(text.lower())
        if value is None:
            raise ValueError("must be on or off")
        return value


_ON_OFF: Final = {"on": True, "true": True, "1": True, "yes": True} | {
    "off": False,
    "false": False,
    "0": False,
    "no": False,
}


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of several words; the member of an enumeration where the words are its members."""

    choices: tuple[str, ...]

    def from_json(self, value: Any) -> str:
        """Read a word, in small letters."""
        if value not in self.choices:
            raise ValueError(f"must be one of {', '.join(self.choices)}")
        return self.choices[self.choices.index(value)]

    def from_text(self, text: str) -> str:
        """Read a word in any case."""
        return self.from_json(text.lower())


@dataclass(frozen=True, slots=True)
class Text:
    """Any text, or one that matches a pattern in full, which REST checks."""

    pattern: str = ""

    def from_json(self, value: Any) -> str:
        """Read a JSON string."""
        if not isinstance(value, str):
            raise ValueError("must be a string")
        return value

    def from_text(self, text: str) -> str:
        """Take the text as it is."""
        return text


@dataclass(frozen=True, slots=True)
class Texts:
    """A text, or a list of at most ``most`` texts of at most ``most_chars``, none empty."""

    most: int
    most_chars: int

    def from_json(self, value: Any) -> tuple[str, ...]:
        """Read a JSON string or a list of strings."""
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(one, str) and one for one in texts):
            raise ValueError("must be a string or a list of strings, none empty")
        if len(texts) > self.most:
            raise ValueError(f"must have at most {self.most} strings")
        if any(len(one) > self.most_chars for one in texts):
            raise ValueError(f"must have strings of at most {self.most_chars} characters")
        return tuple(texts)

    def from_text(self, text: str) -> tuple[str, ...]:
        """Read one text."""
        return self.from_json(text)


@dataclass(frozen=True, slots=True)
class TokenBias:
    """A number in [-most, most] for each of at most ``most_tokens`` token ids, ascending."""

    most: float
    most_tokens: int

    def from_json(self, value: Any) -> tuple[tuple[int, float], ...]:
        """Read a JSON object of token ids and numbers, such as ``{"17": -100}``."""
        if not isinstance(value, Mapping):
            raise ValueError('must be an object of token ids and numbers, such as {"17": -100}')
        if len(value) > self.most_tokens:
            raise ValueError(f"must name at most {self.most_tokens} tokens")
        biases: dict[int, float] = {}
        number = Number(-self.most, self.most)
        for key, bias in value.items():
            if not _TOKEN_ID.fullmatch(str(key)):
                raise ValueError(f"must have token ids as keys, not {str(key)[:40]!r}")
            if int(key) in biases:
                raise ValueError(f"must name token {int(key)} once")
            try:
                biases[int(key)] = number.from_json(bias)
            except ValueError as error:
                raise ValueError(f"of token {int(key)} {error}") from None
        return tuple(sorted(biases.items()))

    def from_text(self, text: str) -> tuple[tuple[int, float], ...]:
        """Read the text of such an object."""
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        return self.from_json(value)


_TOKEN_ID: Final = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds, 0.0 without a limit: JSON has whole milliseconds, a SET has a number and a unit."""

    most_ms: int

    def from_json(self, value: Any) -> float:
        """Read whole milliseconds."""
        return Whole(0, self.most_ms).from_json(value) / 1000

    def from_text(self, text: str) -> float:
        """Read a duration such as 500ms or 2min; a bare number is milliseconds."""
        match = _DURATION.fullmatch(text.strip())
        if match is None:
            raise ValueError("must be a duration such as 500ms, 30s or 2min (0 is no limit)")
        seconds = float(match[1]) * _UNIT_S[match[2] or "ms"]
        if seconds > self.most_ms / 1000:
            raise ValueError(f"must be at most {self.most_ms} ms")
        return seconds


_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|h|d)?")
_UNIT_S: Final = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
