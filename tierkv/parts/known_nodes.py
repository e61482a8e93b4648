"""A file with the known nodes, for a front that starts while the meta server is away.

Created by ``tierkv serve front``; scheduler/nodes/cluster_view.py reads and writes. The file is a
cache: a missing or damaged file, or a file of another cluster, counts as empty. The file contains
no secret.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvwire.v1 import meta_pb2
from tierkv.metaserver.client import DirectoryNode
from tierkv.metaserver.rpc import wire

log = logging.getLogger("tierkv.front")


class NodeFile:
    """A file of nodes; satisfies tierkv.scheduler.nodes.cluster_view.NodeMemory."""

    def __init__(self, path: Path, *, meta_address: str) -> None:
        """Create without I/O.

        Args:
            path: replaced as a whole when the nodes change.
            meta_address: distinguishes clusters that share a folder.
        """
        self._path = path
        self._meta_address = meta_address
        self._written = ""

    def load(self) -> tuple[tuple[DirectoryNode, ...], str]:
        """Return the nodes and the name of the default model from the last ``note``."""
        try:
            found: dict[str, Any] = json.loads(self._path.read_text())
            if found["meta_address"] != self._meta_address:
                return (), ""
            messages = (json_format.ParseDict(n, meta_pb2.DirectoryNode()) for n in found["nodes"])
            return tuple(map(wire.NODE_STATE.from_proto, messages)), str(found["default_model"])
        except FileNotFoundError:
            return (), ""
        except (
            OSError, ValueError, KeyError, TypeError, json_format.ParseError, RemoteProtocolError
        ) as error:  # fmt: skip
            log.warning("can't read the nodes of the last run from %s: %s", self._path, error)
            return (), ""

    def note(self, nodes: Sequence[DirectoryNode], default_model: str) -> None:
        """Write the nodes to the file after a change; a failed write is only logged."""
        text = self._text(nodes, default_model)
        if text == self._written:
            return
        self._written = text  # A failed write is not retried before the nodes change.
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft = self._path.with_suffix(".new")
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
        except OSError as error:
            log.warning("can't write the list of nodes to %s: %s", self._path, error)

    def _text(self, nodes: Sequence[DirectoryNode], default_model: str) -> str:
        infos = [json_format.MessageToDict(_lasting(node)) for node in nodes]
        content = {
            "meta_address": self._meta_address, "default_model": default_model, "nodes": infos,
        }  # fmt: skip
        return json.dumps(content, indent=1, sort_keys=True)


def _lasting(node: DirectoryNode) -> meta_pb2.DirectoryNode:
    """Remove the fields that change with each heartbeat."""
    message = wire.NODE_STATE.to_proto(node)
    message.ClearField("report")
    message.ClearField("heartbeat_age_s")
    message.ClearField("state")
    return message
