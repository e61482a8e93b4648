"""Reads the tokens of statements for the front, from left to right.

Pure. cluster_command.py and jobs/job_command.py know the statements; this module knows names,
options and values.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.kvcore import limits
from tierkv.kvcore.errors import SqlSyntaxError
from tierkv.sql.text.lexer import Token, TokenKind, string_value

_NAME: Final = re.compile(limits.NAME_PATTERN)


@dataclass(frozen=True, slots=True)
class CommandOption:
    """One ``name = value`` of a statement; a list of values is joined by commas.

    Attributes:
        name: in lower case.
        value: text of the value.
        position: of the name, counted in characters from 1.
    """

    name: str
    value: str
    position: int


class CommandReader:
    """Reads a statement; each method raises SqlSyntaxError for unexpected tokens.

    Attributes:
        tokens: of the statement.
        at: the next token.
    """

    def __init__(self, tokens: Sequence[Token], at: int) -> None:
        self.tokens = tokens
        self.at = at

    def end(self) -> None:
        """Refuse further text."""
        if self.at < len(self.tokens):
            raise self.wrong("unexpected text")

    def if_exists(self, verb: str) -> bool:
        """Take IF EXISTS, or IF NOT EXISTS after CREATE; return whether it is there."""
        if verb == "ALTER" or not self.word("IF"):
            return False
        wanted = ("NOT", "EXISTS") if verb == "CREATE" else ("EXISTS",)
        for word in wanted:
            if not self.word(word):
                raise self.wrong(f"expected {' '.join(wanted)}")
        return True

    def name(self, what: str) -> str:
        """Take a name: a word in lower case, or a quoted name as it is."""
        token = self.next(what)
        name = token.text.lower() if token.kind is TokenKind.WORD else ""
        if token.kind is TokenKind.QUOTED:
            name = token.text[1:-1]
        if not name or not _NAME.fullmatch(name):
            self.at -= 1
            raise self.wrong(f"expected {what}")
        return name

    def options(self) -> tuple[CommandOption, ...]:
        """Take ``(name = value, ...)``."""
        self.expect("(")
        found: dict[str, CommandOption] = {}
        while True:
            option = self.option(known=found)
            found[option.name] = option
            if not self.sign(","):
                break
        self.expect(")")
        return tuple(found.values())

    def option(self, known: Container[str] = ()) -> CommandOption:
        """Take ``name [=] value``; ``known`` are the names given before."""
        token = self.next("an option")
        name = token.text.lower()
        if token.kind is not TokenKind.WORD or name in known:
            self.at -= 1
            raise self.wrong(
                f"option {name} is given twice" if name in known else "expected an option's name"
            )
        self.sign("=")
        return CommandOption(name, self._value(), token.start + 1)

    def _value(self) -> str:
        if not self.sign("("):
            return self._scalar()
        values = [self._scalar()]
        while self.sign(","):
            values.append(self._scalar())
        self.expect(")")
        return ",".join(values)

    def _scalar(self) -> str:
        token = self.next("a value")
        if token.kind is TokenKind.STRING:
            return string_value(token)
        if token.kind is TokenKind.NUMBER:
            return token.text + self._unit(token)
        if token.kind in (TokenKind.WORD, TokenKind.QUOTED):
            return token.text + self._dotted()
        self.at -= 1
        raise self.wrong("expected a value; quote a value such as '4GiB'")

    def _dotted(self) -> str:
        """Take what follows a name behind dots, as in d.id."""
        found = ""
        while self.sign("."):
            found += f".{self.next('a name').text}"
        return found

    def _unit(self, number: Token) -> str:
        """Take the unit right behind a number, as in 4GiB; empty without one."""
        after = self.tokens[self.at] if self.at < len(self.tokens) else None
        if after is None or after.kind is not TokenKind.WORD or after.start != number.end:
            return ""
        self.at += 1
        return after.text

    def word(self, *words: str) -> bool:
        """Take the next token if the token is among the words; return whether it was."""
        found = self.at < len(self.tokens) and self.tokens[self.at].upper in words
        self.at += found
        return found

    def sees(self, sign: str) -> bool:
        """Return whether a sign comes next."""
        return self.at < len(self.tokens) and self.tokens[self.at].text == sign

    def sign(self, sign: str) -> bool:
        """Take the next token if it is the sign; return whether it was."""
        found = self.sees(sign)
        self.at += found
        return found

    def expect(self, sign: str) -> None:
        """Take a sign."""
        if not self.sign(sign):
            raise self.wrong(f'expected "{sign}"')

    def next(self, what: str) -> Token:
        """Take the next token."""
        if self.at >= len(self.tokens):
            raise self.wrong(f"expected {what}")
        self.at += 1
        return self.tokens[self.at - 1]

    def wrong(self, what: str) -> SqlSyntaxError:
        """Return the error of the next token."""
        if self.at >= len(self.tokens):
            return SqlSyntaxError(f"{what} at end of input", position=self.tokens[-1].end + 1)
        token = self.tokens[self.at]
        return SqlSyntaxError(f'{what} at or near "{token.text}"', position=token.start + 1)
