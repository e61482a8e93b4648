"""Every bound on input, in one place.

Edges (pgwire, http, gRPC, data-plane frames, config) validate against these once; deeper code
trusts them. Raising a number here is a design decision: say why beside it.
"""

from __future__ import annotations

from typing import Final

MAX_SQL_BYTES: Final = 16 << 20
"""Longest SQL text; a statement is parsed in memory more than once."""

MAX_SQL_TOKENS: Final = 300_000
"""Words, numbers, operators and texts in one SQL text; literals are one each, however long. An
INSERT of 65,535 parameters, the protocol's most, has about 200,000."""

LONG_SQL_CHARS: Final = 16 << 10
"""Longer SQL text is cut into tokens beside the event loop, not on it."""

MAX_REDO_CELLS: Final = 4_000_000
"""Values that a transaction keeps in memory to insert again after ROLLBACK TO; beyond them its
earlier changes can't be made again."""

MAX_PGWIRE_MESSAGE_BYTES: Final = 64 << 20
"""Longest frontend message (COPY data chunks included)."""

MAX_PGWIRE_FRAME_BYTES: Final = 1 << 30
"""Longest length a frontend message may claim; up to it one that is too long is read past and
refused, beyond it (PostgreSQL's own bound) the stream is taken for broken."""

MAX_RESULT_COLUMNS: Final = 32_767
"""Columns of a result over the PostgreSQL protocol; drivers read their number as a signed int16."""

MAX_STARTUP_BYTES: Final = 10_000
"""Longest StartupMessage; PostgreSQL's own MAX_STARTUP_PACKET_LENGTH."""

MAX_HTTP_BODY_BYTES: Final = 16 << 20
MAX_HTTP_PROMPTS: Final = 1_024
"""Prompts in one /v1/completions request; each becomes a call of its own."""

MAX_CHAT_MESSAGES: Final = 4_096
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 256
MAX_COMPLETION_TOKENS: Final = 1 << 20
MAX_CONTEXT_TOKENS: Final = 1 << 21
MAX_PROMPT_CHARS: Final = 8 << 20

MAX_NAME_CHARS: Final = 128
"""Tenants, namespaces, models, sessions and nodes; grammar in ``NAME_PATTERN``."""

NAME_PATTERN: Final = r"[A-Za-z0-9_][A-Za-z0-9_.:\-/]{0,127}"

MAX_REASON_CHARS: Final = 1_024
"""Why a node uses the path it uses, or a note to people; longer ones are cut by their writer."""

MAX_NOTES: Final = 64
"""Notes to people in a node's report, and kinds of complaints of an engine; more are one kind."""

MAX_ENGINE_WORK: Final = 1_024
"""Calls to the pool that an engine has waiting; more are answered as misses at once."""

MAX_CHAIN_BLOCKS: Final = 8_192
"""Blocks in one locate or lookup: 512 K tokens at 64 tokens a block."""

MAX_CHAINS_PER_QUESTION: Final = 256
"""Chains of one question to the directory; together they have at most MAX_CHAIN_BLOCKS blocks."""

MAX_CHUNKS: Final = 1_024
"""Chunks (documents) in one prompt."""

MAX_CONTEXT_FIELDS: Final = 256
"""Fields in one call's context; ordering them compares each with each."""

MAX_LABELS: Final = 1_024
"""Labels one answer may be chosen from; each costs at least a token's probability."""

MAX_SCORED_TOKENS: Final = 2_048
"""Tokens whose probability one request may ask for: those that all labels go on with, and ends."""

MAX_HIDDEN: Final = 1 << 17
"""Longest embedding that is taken from a node; the largest known models have 2 ** 14."""

MAX_EXTRACTED_FIELDS: Final = 256
"""Fields one ai_extract may name; each is a question of its own about the same document."""

MAX_SCHEMA_CHARS: Final = 64 << 10
"""Longest JSON Schema that an answer may be held to; it is compiled on the node."""

MAX_EVENTS_PER_BATCH: Final = 16_384
MAX_ENGINE_BLOCKS: Final = 1 << 20
"""Blocks one foreign engine may be believed to hold in its own cache, some 400 bytes each; more are
not noted, and counted."""

MAX_ENGINE_NAMES: Final = 1 << 17
"""Names of blocks an engine dropped that are kept, because blocks may still be stored behind
them."""

MAX_ENGINE_EVENT_BYTES: Final = 64 << 20
"""Longest message of an engine's KV events; one prompt of MAX_CONTEXT_TOKENS takes a sixth."""

MAX_ENGINE_REPLY_BYTES: Final = 16 << 20
"""Longest reply, or event of a stream, that is taken from another engine's HTTP server."""

MAX_QUEUED_ANSWER_TOKENS: Final = 4_096
"""Tokens of an answer, of text its bytes, that are read from another engine ahead of a slow reader
(and one piece)."""

MAX_ENGINE_RANKS: Final = 64
"""Data-parallel ranks of one engine whose events are followed, each on a port of its own."""

MAX_LAYERS: Final = 256
MAX_LAYOUT_ORDER_CHARS: Final = 64
MAX_SLOT_BYTES: Final = 1 << 30
MAX_FRAME_BYTES: Final = (1 << 30) + (1 << 16)
"""Longest data-plane frame body: one slot and its header."""

MAX_FRAME_ITEMS: Final = 8_192
MAX_NODES: Final = 4_096
MAX_MODELS_PER_NODE: Final = 64
MAX_GRPC_MESSAGE_BYTES: Final = 64 << 20
MAX_REPLAY_ROUNDS: Final = 64
"""Rounds of collect, evaluate, replay before a statement is refused as not converging."""

MAX_NESTED_CALLS: Final = 60
"""AI calls within each other; each takes a round of its own, see MAX_REPLAY_ROUNDS."""

MAX_CALLS_PER_STATEMENT: Final = 1_000_000
MAX_RETRIES: Final = 10
"""Tries after the first that one call may ask for."""

MAX_PRIORITY: Final = 100
"""Of SQL: from so much earlier to so much later than other calls."""

MAX_QUEUED_REQUESTS: Final = 100_000
MAX_LEASE_S: Final = 3_600.0
"""Longest time one reserve or extend may ask for; a lost owner holds memory no longer than that."""

MAX_LEASES: Final = 100_000
"""Live leases of one meta server; more reserve nothing."""

MAX_TRACE_LINE_BYTES: Final = 1 << 20
"""Longest line of a trace; a chain of MAX_CHAIN_BLOCKS ids takes a tenth of it."""

MAX_TRACE_REQUESTS: Final = 10_000_000
"""Requests of one trace, which the simulator holds in memory."""

MAX_TRACE_REFUSED: Final = 10
"""Unreadable lines that any trace may have; beyond them the share below decides."""

MAX_TRACE_REFUSED_SHARE: Final = 0.01
"""A trace with more unreadable lines is another format, and its numbers would mislead."""

MAX_SIMULATED_NODES: Final = 1_024
MAX_SIMULATED_GB: Final = 1e9
MAX_SIMULATED_BLOCK_TOKENS: Final = 2_048
MAX_SIMULATIONS: Final = 2
"""Simulations one front runs at a time for SQL; each takes a core and the trace's memory."""

MAX_NORMAL_FORM_CHARS: Final = 8_192
"""What the statistics keep of a statement's text; its id is made from all of it."""

MAX_STATEMENTS_KEPT: Final = 5_000
"""Statements that tierkv.stat_statements counts; pg_stat_statements.max has the same default."""

MAX_FUNCTIONS_KEPT: Final = 1_000
"""Pairs of function and model that tierkv.stat_functions counts."""

MAX_USAGE_ROWS: Final = 100_000
"""Rows of tierkv.usage_history that are kept; about 20 MB on disk."""

MAX_QUERY_LOG_ROWS: Final = 100_000
"""Events of tierkv.query_log that are kept; about 30 MB on disk."""
