"""The ways to order a call's context fields; the values of ``tierkv.field_reorder``.

Read by sql/settings.py and dbfront/calls/field_order.py. Only names; the ordering itself is in the
latter.
"""

from __future__ import annotations

from enum import StrEnum


class FieldReorder(StrEnum):
    """How the order of the fields of ``context => ...`` in a prompt is chosen.

    OFF keeps the order of the call. STATS uses one order for all rows of a call, from statistics of
    these rows.
    """

    OFF = "off"
    STATS = "stats"
