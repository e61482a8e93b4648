"""Object storage as the archive below the disk tier: one object per block.

    <prefix>/ab/<key as 32 hex digits>  =  [record page][payload]

Supports every URL scheme of obstore: s3://, gs://, az://, file:///, memory:///. obstore retries and
times out within the bounds set here; every failure is a CacheError. Several nodes may share one
archive, because equal blocks have equal keys everywhere.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from tierkv.kvcore.block import BlockSpec
from tierkv.kvcore.clock import Clock, SystemClock
from tierkv.kvcore.errors import (
    BlockNotFoundError,
    CacheError,
    ChecksumError,
    ConfigError,
    TransportError,
)
from tierkv.kvcore.ids import BLOCK_KEY_BYTES, BlockKey
from tierkv.storage.block_store import block_size_checked, check_block, range_span
from tierkv.storage.disk.segment_format import (
    PAGE,
    Record,
    is_sound,
    pack_checksums,
    pack_record,
    parse_record,
    range_is_sound,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 30.0
"""Longest request, and longest time from a first try to the last retry."""

_RETRIES: Final = 3
_RECORDS_KEPT: Final = 1 << 16
"""Record pages kept in memory (least recently used goes first); a ranged read of a known block is
one request."""

_KEYS_KEPT: Final = 1 << 22
_LIST_CHUNK: Final = 1_000
_LISTING_THREADS: Final = 8


class ObjectArchive:
    """A BlockStore on object storage; see tierkv.storage.block_store.BlockStore.

    The archive has no capacity limit; the bucket's owner sets a lifecycle rule. Created by
    ``open``.
    """

    def __init__(self, store: ObjectStore, url: str, clock: Clock) -> None:
        self.url = url
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: set[BlockKey] = set()
        self._records: OrderedDict[BlockKey, Record] = OrderedDict()
        self._last_sequence = 0
        self._closed = False

    @classmethod
    def open(cls, url: str, *, clock: Clock | None = None, **options: str) -> ObjectArchive:
        """Open an archive; no request is made yet.

        Args:
            url: for example ``s3://bucket/prefix`` or ``file:///var/lib/tierkv/archive``.
            clock: dates the blocks.
            options: of the store, as obstore names them: ``endpoint``, ``region``,
                ``access_key_id``, ``secret_access_key``, ``virtual_hosted_style_request``...

        Raises:
            ConfigError: obstore is not installed, or URL or options make no sense.
        """
        try:
            # Optional: a node without an archive needs no object storage library.
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as error:
            raise ConfigError(
                "an archive in object storage needs the package obstore",
                hint="Run `pip install 'tierkv[s3]'`.",
            ) from error
        settings: dict[str, Any] = dict(options)
        if url.startswith("file:"):
            settings["mkdir"] = True
        elif not url.startswith("memory:"):
            settings |= _network_settings(options)
        try:
            return cls(from_url(url, **settings), url, clock or SystemClock())
        except (BaseError, ValueError, TypeError) as error:
            # The rest of the text is obstore's internal state.
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"the archive {url} can't be opened: {reason}",
                hint="Check the URL (s3://, gs://, az://, file:///) and dmp.archive_options.",
            ) from error

    def put(self, block: BlockSpec, payload: memoryview) -> None:
        block = check_block(block, payload)
        if self.exists(block.key):
            return
        flat = payload.cast("B")
        record = Record(block, self._next_sequence(), pack_checksums(block, flat))
        data = b"".join((pack_record(record, nonce=0), flat))
        import obstore  # As in ``open``.

        with self._request(block.key):
            obstore.put(self._store, _path(block.key), data, use_multipart=False)
        self._learn(record)

    def get_range(self, key: BlockKey, index: int, destination: memoryview) -> None:
        record = self.record(key)
        span = range_span(record.block, index, destination)
        data = self._fetch(key, PAGE + span.start, PAGE + span.stop)
        if not range_is_sound(record, index, data):
            raise self._bad_bytes(key)
        destination.cast("B")[:] = data

    def get_block(self, key: BlockKey, destination: memoryview) -> bytes:
        data = self._fetch(key, 0, PAGE + destination.nbytes)
        record = parse_record(data[:PAGE], nonce=0)
        if record is None or record.block.key != key:
            raise self._bad_bytes(key)
        flat = block_size_checked(record.block, destination)
        if len(data) != PAGE + len(flat) or not is_sound(record, data[PAGE:]):
            raise self._bad_bytes(key)
        flat[:] = data[PAGE:]
        self._learn(record)
        return record.checksums

    def record(self, key: BlockKey) -> Record:
        """Return the record of a block; fetches the record page if the record is not in memory.

        Raises:
            BlockNotFoundError, ChecksumError, TransportError: as for a read.
        """
        with self._lock:
            self._check_open()
            known = self._records.get(key)
            if known is not None:
                self._records.move_to_end(key)
                return known
        record = parse_record(self._fetch(key, 0, PAGE), nonce=0)
        if record is None or record.block.key != key:
            raise self._bad_bytes(key)
        self._learn(record)
        return record

    def remembered(self, key: BlockKey) -> Record | None:
        """Return the record of a block if it is in memory; makes no request."""
        with self._lock:
            self._check_open()
            return self._records.get(key)

    def known(self, key: BlockKey) -> bool:
        """Whether the archive held the block when last heard of; no request."""
        with self._lock:
            self._check_open()
            return key in self._keys

    def exists(self, key: BlockKey) -> bool:
        if self.known(key):
            return True
        import obstore  # As in ``open``.

        try:
            with self._request(key):
                obstore.head(self._store, _path(key))
        except BlockNotFoundError:
            return False
        self._add_key(key)
        return True

    def find(self, key: BlockKey) -> BlockSpec | None:
        try:
            return self.record(key).block
        except BlockNotFoundError:
            return None

    def delete(self, key: BlockKey) -> None:
        import obstore  # As in ``open``.

        self._forget(key)
        try:
            with self._request(key):
                obstore.delete(self._store, _path(key))
        except BlockNotFoundError:
            return

    def list_keys(self) -> Iterator[list[BlockKey]]:
        """List the keys of the archive, a chunk per request, and remember them.

        Raises:
            TransportError: the archive did not answer.
        """
        import obstore  # As in ``open``.

        with self._request(None):
            chunks = obstore.list(self._store, chunk_size=_LIST_CHUNK)
        while True:
            with self._request(None):
                chunk = next(chunks, None)
            if chunk is None:
                return
            keys = [key for meta in chunk if (key := _key(meta["path"])) is not None]
            for key in keys:
                self._add_key(key)
            yield keys

    def blocks(self) -> Sequence[BlockSpec]:
        """List the archived blocks; costs one request per block whose record is not in memory."""
        keys = [key for chunk in self.list_keys() for key in chunk]
        with ThreadPoolExecutor(_LISTING_THREADS) as threads:
            records = [record for record in threads.map(self._record_or_none, keys) if record]
        return [record.block for record in sorted(records, key=lambda r: r.sequence)]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._records.clear()
            self._keys.clear()

    def _record_or_none(self, key: BlockKey) -> Record | None:
        try:
            return self.record(key)
        except (BlockNotFoundError, ChecksumError):
            return None

    def _fetch(self, key: BlockKey, start: int, stop: int) -> memoryview:
        import obstore  # As in ``open``.

        try:
            with self._request(key):
                data = obstore.get_range(self._store, _path(key), start=start, end=stop)
        except BlockNotFoundError:
            self._forget(key)
            raise
        return memoryview(data)

    @contextmanager
    def _request(self, key: BlockKey | None) -> Iterator[None]:
        """Translate obstore's exceptions into cache errors; wraps every request."""
        from obstore.exceptions import BaseError, NotFoundError  # As in ``open``.

        with self._lock:
            self._check_open()
        what = f"block {key.hex()}" if key is not None else "the list of blocks"
        try:
            yield
        except (NotFoundError, FileNotFoundError) as error:
            raise BlockNotFoundError(f"{what} is not in the archive {self.url}") from error
        except (BaseError, OSError, ValueError) as error:
            raise TransportError(f"the archive {self.url} failed for {what}: {error}") from error

    def _bad_bytes(self, key: BlockKey) -> CacheError:
        log.warning("block %s has bad bytes in the archive %s; it is deleted", key.hex(), self.url)
        try:
            self.delete(key)
        except TransportError as error:
            log.warning("%s", error)
        return ChecksumError(f"block {key.hex()} has bad bytes in the archive {self.url}")

    def _learn(self, record: Record) -> None:
        key = record.block.key
        with self._lock:
            self._records[key] = record
            self._records.move_to_end(key)
            if len(self._records) > _RECORDS_KEPT:
                self._records.popitem(last=False)
        self._add_key(key)

    def _add_key(self, key: BlockKey) -> None:
        with self._lock:
            if len(self._keys) < _KEYS_KEPT:
                self._keys.add(key)

    def _forget(self, key: BlockKey) -> None:
        with self._lock:
            self._check_open()
            self._records.pop(key, None)
            self._keys.discard(key)

    def _next_sequence(self) -> int:
        """Number a put by the time of day in microseconds: nodes that share an archive agree."""
        with self._lock:
            self._last_sequence = max(self._last_sequence + 1, int(self._clock.wall() * 1e6))
            return self._last_sequence

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("the archive is closed")


def _network_settings(options: dict[str, str]) -> dict[str, Any]:
    plain_http = any(value.startswith("http://") for value in options.values())
    return {
        "client_options": {
            "timeout": timedelta(seconds=TIMEOUT_S),
            "connect_timeout": timedelta(seconds=5),
            "allow_http": plain_http,
        },
        "retry_config": {
            "max_retries": _RETRIES,
            "retry_timeout": timedelta(seconds=TIMEOUT_S),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=2),
                "base": 2,
            },
        },
    }


def _path(key: BlockKey) -> str:
    name = key.hex()
    return f"{name[:2]}/{name}"


def _key(path: str) -> BlockKey | None:
    """Return the key in an object's name; None for an object that is not ours."""
    folder, _, name = path.rpartition("/")
    try:
        key = BlockKey(bytes.fromhex(name))
    except ValueError:
        return None
    return key if len(key) == BLOCK_KEY_BYTES and folder.endswith(name[:2]) else None
