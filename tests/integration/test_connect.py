"""`tierkv connect` as it is typed: the line alone on standard output, the rest beside it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fix_cluster import ROOT, free_port
from tests.fix_dmp import Rig

pytestmark = pytest.mark.integration

TOKEN = "a-token-of-no-path"
DEMO = str(ROOT / "compute" / "demo_model" / "weights")


def connect(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tierkv", "connect", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def as_a_shell_reads(line: str) -> list[str]:
    """Return the words a POSIX shell makes of a line."""
    script = f"set -- {line}\nprintf '%s\\0' \"$@\""
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def test_a_shell_may_run_what_is_printed(tmp_path: Path, make_node: Callable[..., Rig]) -> None:
    folder = tmp_path / "it's a $model"
    folder.symlink_to(DEMO)
    pool = make_node(token="sesame").server.address
    token = tmp_path / "a token"
    token.write_text("sesame\n")
    done = connect("vllm", "--model", str(folder), "--pool", pool, "--token-file", str(token))
    assert done.returncode == 0, done.stderr
    words = as_a_shell_reads(done.stdout.strip())
    assert words[:3] == ["vllm", "serve", str(folder)]
    told = json.loads(words[words.index("--kv-transfer-config") + 1])
    extra = told["kv_connector_extra_config"]
    assert (extra["pool"], extra["token_file"]) == (pool, str(token))
    assert f"ok       pool: {pool} (shm)" in done.stderr
    assert "sesame" not in done.stdout


def test_a_pool_that_is_down_is_said_and_the_line_is_printed() -> None:
    address = f"127.0.0.1:{free_port()}"
    done = connect("vllm", "--model", DEMO, "--pool", address)
    assert done.returncode == 0
    assert done.stdout.startswith("vllm serve")
    assert "missing  pool: no pool node answers" in done.stderr
    assert f"tierkv serve dmp --port {address.rpartition(':')[2]}" in done.stderr


def test_a_token_of_the_settings_is_in_a_file_that_the_line_names(
    tmp_path: Path, make_node: Callable[..., Rig]
) -> None:
    pool = make_node(token=TOKEN).server.address
    settings = ("--set", f"cluster.token={TOKEN}", "--set", f"cluster.run_dir={tmp_path}")
    done = connect("sglang", "--model", DEMO, "--pool", pool, *settings)
    assert f"ok       pool: {pool}" in done.stderr
    assert TOKEN not in done.stdout + done.stderr
    words = as_a_shell_reads(done.stdout.strip())
    told = json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])
    file = Path(told["token_file"])
    assert (file.read_text(), file.stat().st_mode & 0o077) == (TOKEN + "\n", 0)
    stats = done.stderr.strip().splitlines()[-1].strip()
    assert run_told(stats).returncode == 0


def test_json_holds_everything(make_node: Callable[..., Rig]) -> None:
    meta = f"127.0.0.1:{free_port()}"
    done = connect("vllm", "--model", DEMO, "--meta", meta, "--role", "prefill", "--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert as_a_shell_reads(told["line"]) == told["argv"]
    states = {finding["subject"]: finding["state"] for finding in told["findings"]}
    assert states["meta"] == "missing" and states["model"] == "ok"
    serve = shlex.split(told["next"][0]["command"])
    assert serve[:6] == ["tierkv", "serve", "prefill", "--engine", "vllm", "--url"]
    events = json.loads(told["argv"][told["argv"].index("--kv-events-config") + 1])
    assert f"engine.events_url={events['endpoint']}" in serve


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--pool", "nowhere"), "no pool address"),
        (("--tenant", "a tenant"), "is not a valid name"),
        (("--token-file", "no/such/file"), "can't be read"),
        (("--set", "pool.transprt=tcp"), "Did you mean pool.transport"),
    ],
)
def test_what_can_not_be_meant_ends_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = connect("vllm", "--model", DEMO, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr and "Traceback" not in done.stderr


def run_told(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that was printed, with this checkout's `tierkv`."""
    ours = command.replace("tierkv ", f"{shlex.quote(sys.executable)} -m tierkv ", 1)
    return subprocess.run(
        ["sh", "-c", ours], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )


class Served:
    """One `tierkv serve ROLE`, ended with the test."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tierkv", "serve", *arguments],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def address(self) -> str:
        """Return where it listens, once it does."""
        assert self.process.stdout is not None
        told: dict[str, str] = json.loads(self.process.stdout.readline())
        return told["address"]

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_a_meta_server_is_asked_for_its_pool(tmp_path: Path) -> None:
    served = [Served("meta", "--port", "0", "--set", f"cluster.run_dir={tmp_path}")]
    try:
        meta = served[0].address()
        alone = connect("vllm", "--model", DEMO, "--meta", meta)
        assert f"missing  meta: no pool node is registered at {meta}" in alone.stderr
        memory = ("--capacity", "64MiB", "--set", f"dmp.segment_dir={tmp_path}")
        served.append(
            Served("dmp", "--port", "0", *memory, "--set", f"cluster.meta_address={meta}")
        )
        served[1].address()
        found = connect("vllm", "--model", DEMO, "--meta", meta)
        assert f"ok       meta: {meta}, 1 pool nodes" in found.stderr
        assert f"--set cluster.meta_address={meta}" in found.stderr
    finally:
        for process in reversed(served):
            process.end()


def test_what_is_to_be_run_next_has_the_token_and_does_not_show_it(tmp_path: Path) -> None:
    token = tmp_path / "the token"
    token.write_text("token-of-the-cluster\n")
    settings = (
        "--set",
        f"cluster.run_dir={tmp_path}",
        "--set",
        "cluster.token=token-of-the-cluster",
    )
    served = Served("meta", "--port", "0", *settings)
    try:
        meta = served.address()
        file = ("--token-file", str(token))
        told = connect("vllm", "--model", DEMO, "--meta", meta, *file, "--format", "json")
        assert "token-of-the-cluster" not in told.stdout
        serve, see = (step["command"] for step in json.loads(told.stdout)["next"])
        assert f'TIERKV_CLUSTER_TOKEN="$(cat {shlex.quote(str(token))})" tierkv serve' in serve
        assert run_told(see).returncode == 0
        refused = run_told(f"tierkv status --set cluster.meta_address={meta}")
        assert refused.returncode == 1
        assert f"the meta server at {meta} refused our cluster token" in refused.stderr
        assert "Set the same token" in refused.stderr
        config = tmp_path / "tierkv.toml"
        lines = ("[cluster]", 'token = "token-of-the-cluster"', f'run_dir = "{tmp_path}"')
        config.write_text("\n".join([*lines, f'meta_address = "{meta}"']))
        told = connect("vllm", "--model", DEMO, "--config", str(config), "--format", "json")
        commands = [step["command"] for step in json.loads(told.stdout)["next"]]
        assert all(command.endswith(f"--config {config}") for command in commands)
        assert run_told(commands[1]).returncode == 0
    finally:
        served.end()
