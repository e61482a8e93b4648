"""Which function and which model each call of a statement is charged to.

dbfront/statement/ai_statement.py tells what it prepares, answers and runs; the numbers go to the
statement's account (dbfront/accounts/statement_entry.py). Calls that need no model are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierkv.dbfront.accounts.statement_entry import StatementEntry
from tierkv.dbfront.call_defaults import CallDefaults
from tierkv.dbfront.calls.evaluation import Outcome, RowFailure
from tierkv.dbfront.contracts import PreparedCall
from tierkv.sql.calls.ai_call import AiCall, CallForm
from tierkv.sql.calls.functions import AI_FUNCTIONS, Returns


class CallAccounts:
    """The calls of one statement.

    Attributes:
        _models: names of the models that answer, by what was asked for.
    """

    def __init__(
        self, forms: Sequence[CallForm], defaults: CallDefaults, account: StatementEntry | None
    ) -> None:
        """Count for ``account``; None counts nothing."""
        self._forms = forms
        self._defaults = defaults
        self._account = account
        self._models: dict[str | None, str] = {}

    def prepared(self, prepared: PreparedCall) -> None:
        """Learn which model a name, or none, stands for."""
        self._models[prepared.call.model] = prepared.model.name

    def outcome(self, call: AiCall, outcome: Outcome) -> None:
        """Count an answered or failed call."""
        function = AI_FUNCTIONS[call.function]
        if self._account is None or function.local:
            return
        model, retries = self._model_of(call), outcome.retries
        if isinstance(outcome, RowFailure):
            is_null = function.returns is not Returns.RESULT
            self._account.failed(function.name, model, is_null=is_null, retries=retries)
        else:
            is_null = outcome.value is None
            self._account.answered(
                function.name, model, outcome.answers, is_null=is_null, retries=retries
            )

    def settled(self, lookups: Mapping[int, int]) -> None:
        """Count for how many rows that are final the engine asked each form.

        The model is empty where each row names its own.
        """
        if self._account is None:
            return
        rows = self._account.rows
        for form in self._forms:
            if not form.function.local:
                named = AiCall(form.function.canonical, form.constants)
                by_row = "model" in form.row_parameters
                key = (form.function.canonical, "" if by_row else self._model_of(named))
                rows[key] = rows.get(key, 0) + lookups[form.key]

    def discard_rows(self) -> None:
        """Forget the rows: they were only collected for."""
        if self._account is not None:
            self._account.rows.clear()

    def _model_of(self, call: AiCall) -> str:
        """Name the model that answers a call; what was asked for when none ever was prepared."""
        asked = call.model or self._defaults.model
        return self._models.get(asked, asked or "")
