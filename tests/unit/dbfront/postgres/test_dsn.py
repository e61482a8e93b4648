"""The DSN of the server behind the relay: what is unusable is told, without its password."""

from __future__ import annotations

import pytest

from tierkv.dbfront.postgres.wire.login import parse_dsn
from tierkv.kvcore.errors import ConfigError


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://ann:correct horse@db/app",
        "host=db password=correct horse dbname=app",
        "host=db password='correct horse",
        "postgresql://ann:%zzhorse@db/app",
    ],
)
def test_a_malformed_string_is_told_without_its_password(dsn: str) -> None:
    with pytest.raises(ConfigError, match="no connection string") as refused:
        parse_dsn(dsn)
    assert "horse" not in f"{refused.value} {refused.value.hint} {refused.value.detail}"
    assert refused.value.__cause__ is None


def test_both_forms_are_read() -> None:
    for dsn in ("postgresql://ann:a%40b@db:5433/app", "host=db port=5433 password='a@b'"):
        target = parse_dsn(dsn)
        assert (target.host, target.port) == ("db", 5433)
