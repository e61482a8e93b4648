"""The text of one statement, which keeps its tokens and its plan.

The doors of the front make a ``SqlStatement`` of what a client sends; it travels to the executor,
and prepared statements keep it. A plan with AI calls is given away once, because its form keys are
good for one run only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from tierkv.sql.plan.plan import StatementPlan, plan_statement
from tierkv.sql.text.lexer import SqlText, Token


class SqlStatement(SqlText):
    """A statement of DuckDB's dialect.

    Attributes:
        _plan: None before the first plan, always of long text, and after a plan with AI calls
            was taken.
    """

    __slots__ = ("_plan",)
    _plan: StatementPlan | None

    def __new__(cls, text: str, tokens: list[Token] | None = None) -> Self:
        """Make a statement that is not planned yet."""
        self = super().__new__(cls, text, tokens)
        self._plan = None
        return self

    def plan(self, new_key_base: Callable[[], int]) -> StatementPlan:
        """Plan it, to describe it; ``take_plan`` will give the same plan.

        Args:
            new_key_base: draws a secret; asked if a plan has to be made.

        Raises:
            UserError: as ``plan_statement``.
        """
        plan = self._plan or plan_statement(self, key_base=new_key_base())
        if not self.is_long:
            self._plan = plan
        return plan

    def take_plan(self, new_key_base: Callable[[], int]) -> StatementPlan:
        """Plan it, to run it; arguments and errors as of ``plan``."""
        plan = self.plan(new_key_base)
        if plan.forms:
            self._plan = None
        return plan
