"""The tree of errors: families, codes, pickling."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import grpc
import pytest

from tierkv.kvcore import errors
from tierkv.kvcore.errors import (
    CacheError,
    ProtocolError,
    RetryableError,
    SqlError,
    SqlSyntaxError,
    TierKVError,
    UserError,
)

FAMILIES = (UserError, RetryableError, CacheError, ProtocolError)


def tree(kind: type[TierKVError] = TierKVError) -> Iterator[type[TierKVError]]:
    if kind.__module__ == errors.__name__:
        yield kind
    for child in kind.__subclasses__():
        yield from tree(child)


KINDS = list(tree())


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_each_error_has_a_family_a_story_and_real_codes(kind: type[TierKVError]) -> None:
    assert kind is TierKVError or sum(issubclass(kind, family) for family in FAMILIES) == 1
    assert kind.__doc__
    assert len(kind.sqlstate) == 5
    assert 400 <= kind.http_status < 600
    assert kind.grpc_status in grpc.StatusCode.__members__


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_each_error_survives_pickling_and_copying(kind: type[TierKVError]) -> None:
    error = kind("what", detail="facts", hint="cure")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert again.__dict__ == error.__dict__
        assert (str(again), again.args) == ("what", ("what",))


def test_errors_with_facts_of_their_own_survive_pickling() -> None:
    for error in (
        SqlError("no such table", sqlstate="42P01", position=9, hint="create it"),
        SqlSyntaxError("near FORM", position=10),
        RetryableError("later", retry_after_ms=5),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert again.__dict__ == error.__dict__
        assert again.sqlstate == error.sqlstate


def test_an_engines_sqlstate_stays_with_its_instance() -> None:
    assert SqlError("x", sqlstate="23505").sqlstate == "23505"
    assert SqlError("y").sqlstate == SqlError.sqlstate == "42000"


def test_cache_errors_never_look_like_a_users_fault() -> None:
    for kind in KINDS:
        if issubclass(kind, CacheError):
            assert kind.http_status == 500
            assert kind.sqlstate == "XX000"
