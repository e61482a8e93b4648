"""Run the small benchmarks in sequence and print the numbers.

``make bench``, or ``python -m bench``; ``python -m bench --peers`` prints one table of ratios to
peers and to floors of the machine instead. Each benchmark is a separate script: ``python -m
bench.reattach``. ``python -m bench.pool`` compares the pool with peers; the comparison takes longer
and needs the peers' packages. ``make quality`` measures the cost of lossy options in answers.
"""

from __future__ import annotations

import sys

from bench import (
    batch,
    blend_batch,
    block_layers,
    block_size,
    chat_reuse,
    codec,
    compute,
    controller,
    decoding,
    field_order,
    front_overhead,
    load_choice,
    meta,
    peers,
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
from bench.report import make_parser

parser = make_parser(__doc__)
parser.add_argument("--peers", action="store_true", help="one table of ratios to peers and floors")
if parser.parse_known_args()[0].peers:
    peers.main(sys.argv[1:])
    sys.exit()
_SCRIPTS = [
    start_time, batch, reattach, block_layers, block_size, codec, front_overhead, chat_reuse,
    pipeline, split, controller, load_choice, blend_batch, slow_path, decoding, warm_rests, compute,
    routing_decision, meta, plan, field_order, router, sizing, sql,
]  # fmt: skip
for script in _SCRIPTS:
    script.main(sys.argv[1:])
