"""A path whose peer was silent: left alone until a probe in the background has reached it again.

Owned by a connection pool (dmp/transport/connection_pool.py). A refused connection costs nothing
and is tried each time; an operation that times out costs its caller seconds, so one does, and those
that follow fail at once. Nothing else uses the thread: it lives while the path is left alone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from tierkv.kvcore.errors import TransportError

log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 4.0
"""Before the first probe and, doubled after each that failed, between later ones."""


class SilentPath:
    """Closed while all is well; open (calls fail at once) from a time-out to an answered probe.

    Attributes:
        reason: why calls fail; empty while they don't.
    """

    def __init__(self, name: str, probe: Callable[[], bool]) -> None:
        """Begin closed.

        Args:
            name: of the peer, for the log.
            probe: tries to reach the peer, which may take a while; True: it answered.
        """
        self.reason = ""
        self._name = name
        self._probe = probe
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def check(self) -> None:
        """Fail while the peer is left alone.

        Raises:
            TransportError: it is.
        """
        if self.reason:
            raise TransportError(f"left alone until it answers again: {self.reason}")

    def timed_out(self, reason: str) -> None:
        """Leave the peer alone and begin to probe it, unless that is so already."""
        with self._lock:
            if self.reason or self._ended.is_set():
                return
            self.reason = reason
        log.warning("dmp %s is left alone until it answers again: %s", self._name, reason)
        threading.Thread(target=self._keep_probing, name="dmp-probe", daemon=True).start()

    def answered(self) -> None:
        """Use the path again: the peer was reached."""
        with self._lock:
            was, self.reason = self.reason, ""
        if was:
            log.info("dmp %s answers again", self._name)

    def end(self) -> None:
        """Probe no more."""
        self._ended.set()

    def _keep_probing(self) -> None:
        pause_s = FIRST_PAUSE_S
        while self.reason and not self._ended.wait(pause_s):
            if self._probe():
                self.answered()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
