"""``make bench``: run every benchmark and print its numbers; ``--quick`` for a coarse round."""

from __future__ import annotations

import sys

from bench import block_layers, chat_reuse, front_overhead, pipeline, reattach, start_time

for script in (start_time, reattach, block_layers, front_overhead, chat_reuse, pipeline):
    script.main(sys.argv[1:])
