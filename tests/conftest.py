"""Fixtures live in topic plugins (tests/fix_*.py), listed here once."""

from __future__ import annotations

pytest_plugins: list[str] = [
    "tests.fix_sql",
    "tests.fix_dmp",
    "tests.fix_cluster",
    "tests.fix_s3",
    "tests.fix_tls",
    "tests.fix_rdma",
]
