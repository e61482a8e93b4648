"""Fixtures live in topic plugins (tests/fix_*.py), listed here once."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes says something about the machine, not about the code. Half of the usual
# examples keep `make test` short; `--hypothesis-profile=tierkv-thorough` tries many more.
settings.register_profile(
    "tierkv",
    max_examples=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("tierkv-thorough", settings.get_profile("tierkv"), max_examples=1_000)
# CI judges a change by the same examples each time; the search for new ones is for `make test`.
settings.register_profile("tierkv-ci", settings.get_profile("tierkv"), derandomize=True)
settings.load_profile("tierkv")

pytest_plugins: list[str] = [
    "tests.fix_sql",
    "tests.fix_dmp",
    "tests.fix_pool",
    "tests.fix_cluster",
    "tests.fix_s3",
    "tests.fix_tls",
    "tests.fix_rdma",
    "tests.fix_postgres",
    "tests.fix_serve_dmp",
    "tests.fix_door",
    "tests.fix_jobs",  # Behind those that it imports.
]
