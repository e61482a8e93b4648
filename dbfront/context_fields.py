"""``context => {...}``: order-free fields, written as ``key: value`` lines for a whole batch."""

from __future__ import annotations

import json
from collections.abc import Sequence

from dbfront.call_defaults import CallDefaults
from sql.ai_call import AiCall
from sql.functions import CONTEXT


def rendered_contexts(calls: Sequence[AiCall], defaults: CallDefaults) -> dict[AiCall, str]:
    """Write the context of each call that has one, in the order ``field_reorder`` asks for."""
    return {
        call: "\n".join(f"{key}: {value}" for key, value in json.loads(text).items())
        for call in calls
        if (text := call.text(CONTEXT))
    }
