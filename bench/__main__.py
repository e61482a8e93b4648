"""Run the small benchmarks one after the other and print their numbers.

``make bench``, or ``python -m bench``. Each is a script of its own: ``python -m bench.reattach``.
The pool beside its peers takes longer and needs their packages: ``python -m bench.pool``; what
lossy options cost in answers is ``make quality``.
"""

from __future__ import annotations

import sys

from bench import (
    block_layers,
    block_size,
    chat_reuse,
    codec,
    compute,
    controller,
    decoding,
    field_order,
    front_overhead,
    meta,
    pipeline,
    plan,
    reattach,
    router,
    routing_decision,
    sizing,
    slow_path,
    split,
    sql,
    start_time,
    warm_rests,
)
from bench.report import parse_arguments

parse_arguments(__doc__)
_SCRIPTS = [
    start_time, reattach, block_layers, block_size, codec, front_overhead, chat_reuse, pipeline,
    split, controller, slow_path, decoding, warm_rests, compute, routing_decision, meta, plan,
    field_order, router, sizing, sql,
]  # fmt: skip
for script in _SCRIPTS:
    script.main(sys.argv[1:])
