"""The text of one statement, with tokens and plan.

The doors of the front make a ``SqlStatement`` of each client statement; the executor runs this
value, and prepared statements keep it. A plan with AI calls is handed out once, because its form
keys are valid for a single run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from tierkv.sql.plan.plan import StatementPlan, plan_statement
from tierkv.sql.text.lexer import SqlText, Token


class SqlStatement(SqlText):
    """A statement of DuckDB's dialect.

    Attributes:
        _plan: None before the first plan, always for long text, and after a plan with AI calls was
            taken.
    """

    __slots__ = ("_plan",)
    _plan: StatementPlan | None

    def __new__(cls, text: str, tokens: list[Token] | None = None) -> Self:
        """Make an unplanned statement."""
        self = super().__new__(cls, text, tokens)
        self._plan = None
        return self

    def plan(self, new_key_base: Callable[[], int]) -> StatementPlan:
        """Plan the statement for a description; ``take_plan`` will return the same plan.

        Args:
            new_key_base: draws a secret key base; called only to make a plan.

        Raises:
            UserError: as ``plan_statement``.
        """
        plan = self._plan or plan_statement(self, key_base=new_key_base())
        if not self.is_long:
            self._plan = plan
        return plan

    def take_plan(self, new_key_base: Callable[[], int]) -> StatementPlan:
        """Plan the statement for a run; arguments and errors as in ``plan``."""
        plan = self.plan(new_key_base)
        if plan.forms:
            self._plan = None
        return plan
