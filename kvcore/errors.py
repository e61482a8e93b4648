"""The tree of errors.

    TierKVError
    ├── UserError          the caller changes the request          4xx, INVALID_ARGUMENT …
    ├── RetryableError     the caller waits (retry_after_ms)       429/503/504
    ├── CacheError         no action: a miss, KV is recomputed     never reaches a user
    └── ProtocolError      a developer, or the peer                08P01 / 400 / INTERNAL

Each leaf carries its codes as class attributes; each boundary has one translator (kvwire/status.py,
dbfront/pgwire/protocol/replies.py, dbfront/http/app.py). CacheError is caught and counted only in
compute/tiers/tiers.py, in scheduler/dispatcher.py with its helpers, and, for programs that use the
pool alone, in dmp/client/node_link.py. docs/errors.md lists every leaf.
"""

from __future__ import annotations

from typing import Any, ClassVar


class TierKVError(Exception):
    """Root of the tree.

    Attributes:
        code: stable machine-readable name.
        sqlstate: five characters, PostgreSQL style.
        http_status: for REST.
        grpc_status: name of the grpc.StatusCode.
        message: the problem, its place and its cure.
        detail: further facts for a log or a DETAIL field.
        hint: advice to the caller.
    """

    code: ClassVar[str] = "internal"
    sqlstate: ClassVar[str] = "XX000"
    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str = "", *, detail: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.__dict__.copy()))

    def __str__(self) -> str:
        return self.message


def _rebuild(kind: type[TierKVError], state: dict[str, Any]) -> TierKVError:
    error = kind.__new__(kind)
    Exception.__init__(error, state.get("message", ""))
    error.__dict__.update(state)
    return error


class UserError(TierKVError):
    """The request can't work as sent; the caller must change it.

    ``position`` counts characters of the SQL text from 1; 0 means unknown or not SQL. ``field``
    names the part of a call at fault, such as ``stop``; empty if unknown.
    """

    code = "invalid_request"
    sqlstate = "22023"
    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    field = ""

    def __init__(
        self, message: str = "", *, position: int = 0, detail: str = "", hint: str = ""
    ) -> None:
        super().__init__(message, detail=detail, hint=hint)
        self.position = position


class SqlSyntaxError(UserError):
    """SQL that can't be parsed."""

    code = "syntax_error"
    sqlstate = "42601"


class SqlError(UserError):
    """An error of the relational engine, passed on with the engine's own SQLSTATE."""

    code = "sql_error"
    sqlstate = "42000"

    def __init__(
        self,
        message: str = "",
        *,
        sqlstate: str = "42000",
        position: int = 0,
        detail: str = "",
        hint: str = "",
    ) -> None:
        super().__init__(message, position=position, detail=detail, hint=hint)
        self.sqlstate = sqlstate  # type: ignore[misc]  # the engine's own, per instance


class UnknownUdfError(UserError):
    """The SQL names an AI function that does not exist."""

    code = "unknown_function"
    sqlstate = "42883"


class UdfArgumentError(UserError):
    """A wrong argument or option of an AI function."""

    code = "invalid_argument"
    sqlstate = "22023"


class UnknownModelError(UserError):
    """No node serves a model of the requested name."""

    code = "model_not_found"
    sqlstate = "42704"
    http_status = 404
    grpc_status = "NOT_FOUND"


class UnknownSessionError(UserError):
    """The client has no conversation, response or item of this name, or no longer."""

    code = "not_found"
    sqlstate = "42704"
    http_status = 404
    grpc_status = "NOT_FOUND"


class SessionFullError(UserError):
    """A conversation has as many items or bytes as are kept of one."""

    code = "session_full"
    sqlstate = "54000"


class ContextTooLongError(UserError):
    """Prompt plus completion exceed the model's context; nothing is ever truncated silently."""

    code = "context_length_exceeded"
    sqlstate = "54000"


class RightMissingError(UserError):
    """The caller lacks the right to do this."""

    code = "permission_denied"
    sqlstate = "42501"
    http_status = 403
    grpc_status = "PERMISSION_DENIED"


class AuthenticationError(UserError):
    """Missing or wrong credentials."""

    code = "invalid_api_key"
    sqlstate = "28P01"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class FeatureNotSupportedError(UserError):
    """A valid request for a feature that TierKV does not have."""

    code = "not_supported"
    sqlstate = "0A000"
    http_status = 400
    grpc_status = "UNIMPLEMENTED"


class ConfigError(UserError):
    """Unusable configuration; the message names the key, its source and the cure."""

    code = "invalid_config"
    sqlstate = "F0000"


class ModelFolderError(UserError):
    """A model folder that can't be served; the message names the missing file or unsupported
    setting.
    """

    code = "model_folder"
    sqlstate = "22023"
    grpc_status = "FAILED_PRECONDITION"


class RowLevelError(UserError):
    """One AI call failed; NULL and a warning in reads, an error in writes."""

    code = "ai_call_failed"
    sqlstate = "22000"


class RetryableError(TierKVError):
    """The same request may succeed later. ``retry_after_ms`` says when to try."""

    code = "unavailable"
    sqlstate = "57P03"
    http_status = 503
    grpc_status = "UNAVAILABLE"

    def __init__(
        self, message: str = "", *, retry_after_ms: int = 1_000, detail: str = "", hint: str = ""
    ) -> None:
        super().__init__(message, detail=detail, hint=hint)
        self.retry_after_ms = retry_after_ms


class OverloadedError(RetryableError):
    """Queues are full."""

    code = "overloaded"
    sqlstate = "53000"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class CallLimitError(RetryableError):
    """The caller has used what its limits allow; other callers are served."""

    code = "limit_exceeded"
    sqlstate = "53400"
    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"


class NoNodeError(RetryableError):
    """No live node can serve the request."""

    code = "no_node"
    sqlstate = "57P03"


class DrainingError(RetryableError):
    """The front is about to end: it finishes what runs and takes nothing new."""

    code = "draining"
    sqlstate = "57P03"

    def __init__(
        self,
        message: str = "this front is shutting down",
        *,
        retry_after_ms: int = 1_000,
        detail: str = "",
        hint: str = "Ask another front; libpq and JDBC try several by themselves: host=a,b.",
    ) -> None:
        super().__init__(message, retry_after_ms=retry_after_ms, detail=detail, hint=hint)


class NodeLostError(RetryableError):
    """A node died while answering and no other node could take over."""

    code = "node_lost"
    sqlstate = "08006"
    http_status = 503


class SessionBusyError(RetryableError):
    """Another turn of the same conversation runs; turns never overlap."""

    code = "conversation_locked"
    sqlstate = "55P03"
    http_status = 409
    grpc_status = "ABORTED"


class SessionStoreError(RetryableError):
    """The place where conversations are kept can't be used at present."""

    code = "session_store_lost"
    sqlstate = "58030"


class NotForgottenError(RetryableError):
    """Copies may be left of a prompt that was to be forgotten; what is gone stays gone."""

    code = "not_forgotten"
    sqlstate = "58030"


class NodeRefusedError(RetryableError):
    """A node refuses this process, as with another cluster token; an operator mends it."""

    code = "node_refused"
    sqlstate = "58000"
    http_status = 503


class DeadlineError(RetryableError):
    """The request ran out of time."""

    code = "deadline_exceeded"
    sqlstate = "57014"
    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"


class CancelledByUserError(RetryableError):
    """The client cancelled the statement."""

    code = "cancelled"
    sqlstate = "57014"
    http_status = 499
    grpc_status = "CANCELLED"


class CacheError(TierKVError):
    """Something in the cache did not work: a miss. Never reaches a user."""

    code = "cache_error"
    grpc_status = "UNAVAILABLE"


class BlockNotFoundError(CacheError):
    """The slot does not hold the block, or no longer."""

    code = "block_not_found"
    grpc_status = "NOT_FOUND"


class LayoutError(CacheError):
    """The size of a block differs from the size that its model and layout require."""

    code = "layout_mismatch"
    grpc_status = "FAILED_PRECONDITION"


class LeaseExpiredError(CacheError):
    """A reservation or lease ran out."""

    code = "lease_expired"
    grpc_status = "ABORTED"


class PoolFullError(CacheError):
    """No slot could be freed for a put."""

    code = "pool_full"
    grpc_status = "ABORTED"


class ThrottledError(CacheError):
    """A namespace has used its rate at a pool node."""

    code = "throttled"
    grpc_status = "RESOURCE_EXHAUSTED"


class ChecksumError(CacheError):
    """Bytes read are not the bytes written."""

    code = "checksum_mismatch"
    grpc_status = "DATA_LOSS"


class TransportError(CacheError):
    """A transfer failed: connection refused, reset, timed out."""

    code = "transport_error"
    grpc_status = "UNAVAILABLE"


class StaleEpochError(CacheError):
    """A reference from an older incarnation or generation."""

    code = "stale_epoch"
    grpc_status = "ABORTED"


class DirectoryUnavailableError(CacheError):
    """The meta server did not answer."""

    code = "directory_unavailable"
    grpc_status = "UNAVAILABLE"


class ProtocolError(TierKVError):
    """Abstract: a rule of a wire protocol was broken."""

    code = "protocol_error"
    sqlstate = "08P01"
    http_status = 400
    grpc_status = "INTERNAL"


class LocalProtocolError(ProtocolError):
    """We broke it: a bug here."""

    code = "local_protocol_error"


class RemoteProtocolError(ProtocolError):
    """The peer broke it."""

    code = "remote_protocol_error"
