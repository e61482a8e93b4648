"""The ways to order a call's context fields; the values of ``tierkv.field_reorder``.

Read by sql/settings.py and dbfront/calls/field_order.py. Only names; what they do is written there.
"""

from __future__ import annotations

from enum import StrEnum


class FieldReorder(StrEnum):
    """Who decides in which order the fields of ``context => ...`` stand in a prompt.

    OFF leaves them as the call wrote them. STATS takes one order for all rows of a call, from
    statistics of these rows.
    """

    OFF = "off"
    STATS = "stats"
