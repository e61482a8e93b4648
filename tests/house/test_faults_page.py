"""docs/faults.md lists every fault once, and each test it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text()
ROWS = re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", PAGE, re.MULTILINE)
LATER = "comes with its feature"


def test_all_faults_are_there_in_their_order() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 44))


def test_each_named_test_exists() -> None:
    missing = []
    for named in re.findall(r"`(tests/[^`]+)`", PAGE):
        file, _, test = named.partition("::")
        path = ROOT / file
        if not path.exists() or (test and f"def {test}(" not in path.read_text()):
            missing.append(named)
    assert missing == []


def test_a_fault_without_a_test_says_why() -> None:
    lines = [line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [line for line in lines if "`tests/" not in line and LATER not in line] == []
