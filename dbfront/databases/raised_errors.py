"""Carries errors that the engine's functions raise to whoever runs the statement, whole.

The engine makes a text of an error raised in a function. The text carries a random mark; the
connection that sees the mark takes the error itself. No statement can take or forge another's.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from tierkv.kvcore.errors import TierKVError

_KEPT: Final = 256
"""Errors that no connection took, as where TRY() swallowed them, are forgotten beyond this."""
_MARK: Final = re.compile(r"tierkv-error-([0-9a-f]{32})")


class RaisedErrors:
    """Errors between the function that raised them and the connection that reports them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: OrderedDict[str, TierKVError] = OrderedDict()

    def marking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of the engine; called on its threads."""

        @wraps(function)
        def marked(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except TierKVError as error:
                raise self.marked(error) from None

        return marked

    def marked(self, error: TierKVError) -> RuntimeError:
        """Return what to raise in a function of the engine for an error of ours."""
        mark = secrets.token_hex(16)
        with self._lock:
            self._errors[mark] = error
            if len(self._errors) > _KEPT:
                self._errors.popitem(last=False)
        return RuntimeError(f"tierkv-error-{mark}")

    def take(self, text: str) -> TierKVError | None:
        """Return the error that an engine's error text stands for, once."""
        found = _MARK.search(text)
        if found is None:
            return None
        with self._lock:
            return self._errors.pop(found[1], None)
