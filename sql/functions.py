"""The AI functions SQL may call: their parameters and how they are named in the engine.

One row per function; a new function of the family is a new row here and an evaluator in the front.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ENGINE_PREFIX: Final = "tierkv_ai_"
"""Engine functions start with this; users may not call them by name."""


@dataclass(frozen=True, slots=True)
class AiFunction:
    """An AI function's signature; ``parameters[0]`` is required, the others are optional."""

    name: str
    parameters: tuple[str, ...]


DOCUMENTS: Final = "documents"
"""A list of text: like the prompt it is data, which comes with each row."""

AI_GENERATE: Final = AiFunction(
    "ai_generate", ("prompt", "model", "system_prompt", "options", DOCUMENTS)
)

AI_FUNCTIONS: Final[dict[str, AiFunction]] = {AI_GENERATE.name: AI_GENERATE}


def engine_function(*, per_row: bool, kept_in_place: bool, documents: bool) -> str:
    """Name the engine function that looks a call up.

    Args:
        documents: it takes a list of documents as its last argument.
        per_row: model, system prompt or options are computed per row, not constant.
        kept_in_place: register as volatile: the engine neither folds it at plan time nor pushes it
            below joins and semi-joins, where it would run for rows nobody asks about.
    """
    shape = "row" if per_row else "call"
    return f"{ENGINE_PREFIX}{shape}{'_docs' * documents}{'_kept' * kept_in_place}"
