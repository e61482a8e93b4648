"""Every bound on input, in one place.

Edges (pgwire, http, gRPC, data-plane frames, config) validate input against these bounds once;
deeper code trusts the input. Raising a bound is a design decision: state the reason next to it.
"""

from __future__ import annotations

from typing import Final

MAX_SQL_BYTES: Final = 16 << 20
"""Longest SQL text; a statement is parsed in memory more than once."""

MAX_SQL_TOKENS: Final = 300_000
"""Words, numbers, operators and literals in one SQL text; a literal of any length counts as one. An
INSERT of 65,535 parameters, the protocol's maximum, has about 200,000.
"""

LONG_SQL_CHARS: Final = 16 << 10
"""Longer SQL text is tokenized in a thread, not on the event loop."""

MAX_REDO_CELLS: Final = 4_000_000
"""Values that a transaction keeps in memory to insert again after ROLLBACK TO. Beyond this number
its earlier changes can't be repeated.
"""

MAX_PGWIRE_MESSAGE_BYTES: Final = 64 << 20
"""Longest frontend message (COPY data chunks included)."""

MAX_PGWIRE_FRAME_BYTES: Final = 1 << 30
"""Longest length that a frontend message may claim (PostgreSQL's own bound). A message that is too
long for its kind is skipped and refused; a claim beyond this bound means a broken stream.
"""

MAX_RESULT_COLUMNS: Final = 32_767
"""Columns of a result over the PostgreSQL protocol; drivers read their number as a signed int16."""

MAX_STARTUP_BYTES: Final = 10_000
"""Longest StartupMessage; PostgreSQL's own MAX_STARTUP_PACKET_LENGTH."""

MAX_HTTP_BODY_BYTES: Final = 16 << 20
MAX_HTTP_PROMPTS: Final = 1_024
"""Prompts in one /v1/completions request; each prompt becomes a separate call."""

MAX_CHAT_MESSAGES: Final = 4_096
MAX_CHOICES: Final = 128
"""Answers to one prompt in one request (``n``), as OpenAI allows."""

MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 256
MAX_TOP_K: Final = (1 << 31) - 1
MAX_PENALTY: Final = 2.0
"""Largest presence, frequency and repetition penalty, as OpenAI and vLLM allow."""

MAX_LOGIT_BIAS: Final = 100.0
MAX_BIASED_TOKENS: Final = 1_024
MAX_TOP_LOGPROBS: Final = 20
"""Alternatives reported with each token, as OpenAI's chat allows."""

MAX_COMPLETION_TOKENS: Final = 1 << 20
MAX_CONTEXT_TOKENS: Final = 1 << 21
MAX_PROMPT_CHARS: Final = 8 << 20

MAX_NAME_CHARS: Final = 128
"""Tenants, namespaces, models, sessions and nodes; grammar in ``NAME_PATTERN``."""

MAX_LIMITED_NAMESPACES: Final = 4_095
"""Namespaces with limits; a pool node has an account for each."""

MAX_RECORDS: Final = 20_000
"""Limits of calls and REST keys of a cluster; each front holds all of them."""

MAX_PINS: Final = 2_000
"""Pinned prompts of a cluster: each front looks at all of them several times a minute."""

MAX_PIN_S: Final = 366 * 86_400.0

MAX_SESSION_ITEMS: Final = 10_000
"""Items of one conversation, or of the responses that one response follows; each turn reads all."""

MAX_SESSION_BYTES: Final = 32 << 20
"""JSON of these items; several times the longest prompt."""

MAX_ITEMS_AT_ONCE: Final = 100
"""Items listed on one page of a conversation; OpenAI's bound."""

MAX_ITEMS_ADDED: Final = 20
"""Items added to a conversation by one request; OpenAI's bound."""

MAX_SESSIONS_OF_TENANT: Final = 1_000_000
"""Conversations of one tenant; a response that begins a conversation counts as one."""

MAX_SESSIONS_SHOWN: Final = 10_000
"""Rows of the views of conversations and of their turns, the last used first."""

MAX_SESSION_TTL_S: Final = 10 * 366 * 86_400.0
MAX_METADATA_PAIRS: Final = 16
MAX_METADATA_KEY_CHARS: Final = 64
MAX_METADATA_VALUE_CHARS: Final = 512
"""OpenAI's bounds of the metadata of a conversation or response."""

MAX_BACKGROUND_RESPONSES: Final = 256
"""Responses that one front answers in the background at a time; more are refused."""

MAX_RECORD_CHARS: Final = 4_096
MAX_AUDIT_RECORDS: Final = 2_000
"""Lines of the audit log that the meta server keeps; whoever needs more reads them in time."""

NAME_PATTERN: Final = r"[A-Za-z0-9_][A-Za-z0-9_.:\-/]{0,127}"

MAX_REASON_CHARS: Final = 1_024
"""Characters of a node's reason for a path, or of a note to people; the writer cuts longer text."""

MAX_NOTES: Final = 64
"""Notes to people in a node's report, and kinds of complaints of an engine; further kinds count as
one."""

MAX_ENGINE_WORK: Final = 1_024
"""Pending pool calls of one engine; further calls are answered as misses at once."""

MAX_CHAIN_BLOCKS: Final = 8_192
"""Blocks in one locate or lookup: 512 K tokens at 64 tokens a block."""

MAX_CHAINS_PER_QUESTION: Final = 256
"""Chains in one locate; together they have at most MAX_CHAIN_BLOCKS blocks."""

MAX_CHUNKS: Final = 1_024
"""Chunks (documents) in one prompt."""

MAX_CONTEXT_FIELDS: Final = 256
"""Fields in one call's context; ordering them compares each with each."""

MAX_LABELS: Final = 1_024
"""Labels that one answer may be chosen from; each label costs at least one token's probability."""

MAX_SCORED_TOKENS: Final = 2_048
"""Tokens whose probability one request may ask for: next tokens of all labels, and end tokens."""

MAX_HIDDEN: Final = 1 << 17
"""Longest embedding accepted from a node; the largest known models have 2 ** 14."""

MAX_EXTRACTED_FIELDS: Final = 256
"""Fields in one ai_extract call; each field is a separate question about the same document."""

MAX_SCHEMA_CHARS: Final = 64 << 10
"""Longest JSON Schema for a guided answer; the node compiles the schema."""

MAX_TOOLS: Final = 128
"""Most tools of one request, as in OpenAI's API."""

MAX_TOOL_CALLS: Final = 64
"""Most calls of tools in one answer."""

MAX_TOOLS_CHARS: Final = 256 << 10
"""Longest grammar of a request's tools; the schemas of their arguments are nearly all of it."""

MAX_EVENTS_PER_BATCH: Final = 16_384
MAX_ENGINE_BLOCKS: Final = 1 << 20
"""Blocks tracked in the caches of one foreign engine, some 400 bytes each; further blocks are only
counted."""

MAX_ENGINE_NAMES: Final = 1 << 17
"""Names of blocks dropped by an engine that are kept, because later blocks may name them as parent.
"""

MAX_ENGINE_EVENT_BYTES: Final = 64 << 20
"""Longest message of an engine's KV events; a prompt of MAX_CONTEXT_TOKENS needs a sixth of this
size."""

MAX_ENGINE_REPLY_BYTES: Final = 16 << 20
"""Longest reply, or event of a stream, read from another engine's HTTP server."""

MAX_QUEUED_ANSWER_TOKENS: Final = 4_096
"""Tokens (for text, bytes) of an answer that are read from another engine ahead of a slow reader,
plus one piece."""

MAX_ENGINE_RANKS: Final = 64
"""Data-parallel ranks of one engine whose events are followed; each rank has a port."""

MAX_LAYERS: Final = 256
MAX_LAYOUT_ORDER_CHARS: Final = 64
MAX_SLOT_BYTES: Final = 1 << 30
MAX_FRAME_BYTES: Final = (1 << 30) + (1 << 16)
"""Longest data-plane frame body: one slot and its header."""

MAX_FRAME_ITEMS: Final = 8_192
MAX_NODES: Final = 4_096
MAX_META_SERVERS: Final = 16
MAX_MODELS_PER_NODE: Final = 64
MAX_GRPC_MESSAGE_BYTES: Final = 64 << 20
MAX_REPLAY_ROUNDS: Final = 64
"""Rounds of collect, evaluate, replay before a statement is refused as not converging."""

MAX_NESTED_CALLS: Final = 60
"""Nesting depth of AI calls; each level takes one replay round, see MAX_REPLAY_ROUNDS."""

MAX_CALLS_PER_STATEMENT: Final = 1_000_000
MAX_RETRIES: Final = 10
MAX_ANSWER_AGE_MS: Final = 10 * 365 * 86_400_000
"""Retries after the first attempt that one call may ask for."""

MAX_PRIORITY: Final = 100
"""SQL option ``priority`` ranges from minus this number (earlier) to plus this number (later)."""

MAX_QUEUED_REQUESTS: Final = 100_000
MAX_LEASE_S: Final = 3_600.0
"""Longest lease that one reserve or extend may ask for; bounds how long a lost owner blocks memory.
"""

MAX_LEASES: Final = 100_000
"""Live leases of one meta server; more reserve nothing."""

MAX_TRACE_LINE_BYTES: Final = 1 << 20
"""Longest line of a trace; a chain of MAX_CHAIN_BLOCKS ids needs a tenth of this size."""

MAX_TRACE_REQUESTS: Final = 10_000_000
"""Requests in one trace; the simulator holds a trace in memory."""

MAX_TRACE_REFUSED: Final = 10
"""Unreadable lines that every trace may have; beyond this number the share below decides."""

MAX_TRACE_REFUSED_SHARE: Final = 0.01
"""A trace with a larger share of unreadable lines has another format and is refused."""

MAX_SIMULATED_NODES: Final = 1_024
MAX_SIMULATED_GB: Final = 1e9
MAX_SIMULATED_BLOCK_TOKENS: Final = 2_048
MAX_SIMULATIONS: Final = 2
"""Concurrent simulations that SQL may start on one front; each takes a core and the trace's memory.
"""

MAX_NORMAL_FORM_CHARS: Final = 8_192
"""Characters of a statement's normal form kept by the statistics; the id is made from the whole
text."""

MAX_STATEMENTS_KEPT: Final = 5_000
"""Statements that tierkv.stat_statements counts; pg_stat_statements.max has the same default."""

MAX_FUNCTIONS_KEPT: Final = 1_000
"""Pairs of function and model counted in tierkv.stat_functions."""

MAX_USAGE_ROWS: Final = 100_000
"""Rows kept in tierkv.usage_history; about 20 MB on disk."""

MAX_QUERY_LOG_ROWS: Final = 100_000
"""Events kept in tierkv.query_log; about 30 MB on disk."""

MAX_JOB_BATCH_ROWS: Final = 100_000
"""Rows of one transaction of a job."""

MAX_JOB_PARTITIONS: Final = 1_024
MAX_JOB_FAILURES_SHOWN: Final = 10_000
"""Rows of tierkv.job_failures."""

MAX_QUEUE_BODY_BYTES: Final = 1 << 20
"""Bytes of an entry of a queue."""

MAX_QUEUE_ENTRIES: Final = 100_000
"""Entries of a queue that are not done; a full queue refuses more."""

MAX_QUEUE_NAME_CHARS: Final = 200
"""Characters in the names of queues, groups and consumers."""

MAX_QUEUE_ROWS: Final = 10_000
"""Pending entries and dead letters of a queue in tierkv.queue_pending."""

MAX_DEAD_LETTERS: Final = 10_000
"""Dead letters of a queue; the oldest are removed first."""

MAX_QUEUE_DELIVERIES: Final = 5
"""Deliveries of an entry; an entry that no worker ended then is a dead letter."""
