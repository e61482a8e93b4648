"""An S3 server for tests: moto's server, a process of its own spoken to over HTTP.

It answers the real S3 protocol as far as the archive uses it (put, ranged get, head, list,
delete); it does not check signatures.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec

import obstore
import pytest
from obstore.store import from_url

BUCKET = "blocks"


@dataclass
class S3Server:
    """A running server; ``address`` stays its own over ``stop`` and ``start``."""

    address: str = "127.0.0.1:0"
    process: subprocess.Popen[str] | None = None
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}"

    def options(self) -> dict[str, str]:
        return {
            "endpoint": f"http://{self.address}",
            "region": "us-east-1",
            "access_key_id": "tierkv-test",
            "secret_access_key": "a-secret-for-tests",
            "virtual_hosted_style_request": "false",
        }

    def start(self) -> None:
        host, port = self.address.split(":")
        command = [sys.executable, "-m", "moto.server", "-H", host, "-p", port]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"http://(127\.0\.0\.1:\d+)", line)
            if found:
                self.address = found[1]
                break
        else:
            raise AssertionError(f"the S3 server did not start: {self.lines}")
        threading.Thread(target=self._drain, args=(self.process,), daemon=True).start()
        self._make_bucket()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def _make_bucket(self) -> None:
        """Create the bucket: S3 calls that PUT /BUCKET, which is an object named '' elsewhere."""
        store = from_url(
            f"http://{self.address}/", client_options={"allow_http": True, "timeout": "10s"}
        )
        obstore.put(store, BUCKET, b"", use_multipart=False)

    def _drain(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with process.stderr as pipe:
            self.lines.extend(pipe)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for the whole run; each test uses a prefix of its own."""
    server = make_s3_server()
    server.start()
    yield server
    server.stop()


def make_s3_server() -> S3Server:
    if find_spec("moto") is None or find_spec("flask") is None:
        pytest.skip("no S3 server here: pip install 'moto[s3]' flask flask-cors")
    return S3Server()
