"""Fixtures live in topic plugins (tests/fix_*.py), listed here once."""

from __future__ import annotations

from hypothesis import settings

# How long one example takes says something about the machine, not about the code.
settings.register_profile("tierkv", deadline=None, print_blob=True)
settings.load_profile("tierkv")

pytest_plugins: list[str] = [
    "tests.fix_sql",
    "tests.fix_dmp",
    "tests.fix_cluster",
    "tests.fix_s3",
    "tests.fix_tls",
    "tests.fix_rdma",
]
