"""Every error of the tree crosses gRPC as itself."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import grpc.aio
import pytest

from tierkv.kvcore import errors
from tierkv.kvcore.errors import (
    AuthenticationError,
    DirectoryUnavailableError,
    RetryableError,
    SqlError,
    SqlSyntaxError,
    TierKVError,
    TransportError,
)
from tierkv.kvwire.status import (
    ERROR_METADATA_KEY,
    error_from_proto,
    error_from_rpc,
    error_to_proto,
    status_of,
)
from tierkv.kvwire.v1 import common_pb2


def tree(kind: type[TierKVError] = TierKVError) -> Iterator[type[TierKVError]]:
    if kind.__module__ == errors.__name__:
        yield kind
    for child in kind.__subclasses__():
        yield from tree(child)


KINDS = list(tree())


def rpc_error(code: grpc.StatusCode, **metadata: bytes) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*((k.replace("_", "-"), v) for k, v in metadata.items()))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details="it broke")


def test_codes_are_unique_so_that_a_code_names_one_class() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_each_error_round_trips_as_the_same_class(kind: type[TierKVError]) -> None:
    error = kind("what was wrong", detail="facts", hint="the cure")
    if isinstance(error, RetryableError):
        error.retry_after_ms = 1_234
    packed = error_to_proto(error).SerializeToString()
    received = rpc_error(status_of(error), **{ERROR_METADATA_KEY.replace("-", "_"): packed})
    got = error_from_rpc(received, default=TransportError)
    assert type(got) is kind
    assert got.__dict__ == error.__dict__
    assert (got.sqlstate, got.http_status) == (error.sqlstate, error.http_status)


def test_sql_errors_keep_sqlstate_and_position() -> None:
    for error in (SqlError("no table", sqlstate="42P01", position=7), SqlSyntaxError(position=3)):
        got = error_from_proto(error_to_proto(error), default=TransportError)
        assert (got.sqlstate, got.__dict__) == (error.sqlstate, error.__dict__)


def test_an_unknown_code_becomes_the_default() -> None:
    got = error_from_proto(
        common_pb2.Error(code="from_the_future", message="m"), default=DirectoryUnavailableError
    )
    assert type(got) is DirectoryUnavailableError
    assert got.message == "m"


def test_a_failure_without_a_typed_error_becomes_the_default() -> None:
    got = error_from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE), default=TransportError)
    assert type(got) is TransportError
    assert got.message == "UNAVAILABLE: it broke"


def test_unauthenticated_is_told_apart_without_a_typed_error() -> None:
    got = error_from_rpc(rpc_error(grpc.StatusCode.UNAUTHENTICATED), default=TransportError)
    assert type(got) is AuthenticationError


def test_a_garbled_typed_error_becomes_the_default() -> None:
    received = rpc_error(grpc.StatusCode.INTERNAL, tierkv_error_bin=b"\xff\xff\xff")
    assert type(error_from_rpc(received, default=TransportError)) is TransportError


def test_texts_too_long_for_metadata_are_cut_visibly() -> None:
    message = error_to_proto(TransportError("x" * 5_000)).message
    assert len(message) == 1_000
    assert message.endswith("…")
