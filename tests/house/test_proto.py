"""The generated code beside the .proto files is what the .proto files generate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generated_code_is_in_sync(tmp_path: Path) -> None:
    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tierkv/kvwire/v1/*.proto"))
    assert protos
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", f"--python_out={tmp_path}"]
    command += [f"--grpc_python_out={tmp_path}", *protos]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    for made in tmp_path.rglob("*_pb2*.py"):
        kept = ROOT / made.relative_to(tmp_path)
        assert made.read_text() == kept.read_text(), f"{kept} is stale: run `make proto`"
