"""The thin shell over pyverbs: devices, registered memory, reliable connections.

The only file that imports pyverbs (versions 44 to 59, which differ in places); called by
dmp/server/rdma_door.py and the dmp/transport/verbs*.py files. Where RDMA is unavailable, functions
return a reason in words. Every failure of the library is a TransportError.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from tierkv.dmp.wire.rdma_messages import QpAddress
from tierkv.kvcore.errors import TransportError

_SYSFS: Final = Path("/sys/class/infiniband")
_IPV4: Final = "0000:0000:0000:0000:0000:ffff:"
_MAX_GIDS: Final = 256
_MAX_READS: Final = 16
_TIMEOUT: Final = 17
"""4.096 us * 2**17: half a second before a packet is sent again."""

_RETRIES: Final = 3
"""A dead peer is noticed after about two seconds. Never 7: Soft-RoCE treats 7 as "no end"."""

_HOPS: Final = 64
_STATUS: Final = {
    2: "local failure",
    4: "local memory not registered",
    5: "flushed after an error",
    9: "invalid request",
    10: "access refused by the peer",
    11: "operation failed at the peer",
    12: "no answer from the peer",
    13: "the peer is not ready",
}


class Access(Enum):
    """Allowed access to registered memory."""

    LOCAL = 0
    READABLE = 1
    SHARED = 2


class Op(Enum):
    """A one-sided operation."""

    READ = 0
    WRITE = 1


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """An active port and the port's address.

    Attributes:
        device: name of the device.
        port: number of the port, from 1.
        gid_index: index of ``gid`` in the port's address table.
        gid: RoCE v2 address of an IPv4 address, or an InfiniBand address.
        lid: InfiniBand local id; 0 on Ethernet.
        mtu: active MTU as ibv_mtu.
        reads: maximum number of concurrent RDMA READs.
    """

    device: str
    port: int
    gid_index: int
    gid: str
    lid: int
    mtu: int
    reads: int


@dataclass(frozen=True, slots=True)
class Discovery:
    """The usable ports of this machine, or the reason for having no ports."""

    ports: tuple[RdmaPort, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished work request; ``error`` is empty after a success."""

    number: int
    error: str


def discover(wanted: Sequence[str] = (), *, sysfs: Path = _SYSFS) -> Discovery:
    """Find the RDMA ports of this machine.

    Args:
        wanted: device names; empty means all.
        sysfs: folder in which the kernel lists devices.

    Returns:
        the ports, in the order of the devices' names; without ports, a reason. Never raises an
        exception.
    """
    names = sorted(path.name for path in sysfs.glob("*"))
    if not names:
        return Discovery((), "no RDMA: this machine has no RDMA device")
    names = [name for name in names if not wanted or name in wanted]
    if not names:
        return Discovery((), f"no RDMA: there is no device {', '.join(wanted)}")
    verbs = _load()
    if isinstance(verbs, str):
        return Discovery((), f"no RDMA: {verbs}")
    ports: list[RdmaPort] = []
    problems: list[str] = []
    for name in names:
        try:
            found = _ports_of(verbs, name)
        except TransportError as error:
            problems.append(error.message)
            continue
        ports += found
        problems += [] if found else [f"{name} has no active port with an IPv4 RoCE v2 address"]
    return Discovery(tuple(ports), "" if ports else f"no RDMA: {'; '.join(problems)}")


class Region:
    """Registered memory of one device; closing a region invalidates the keys.

    Attributes:
        base: the device's address of the first byte: the process address, but 0 for memory of
            another device.
        lkey: key for our own work requests.
        rkey: key for the peers.
    """

    def __init__(self, region: Any, base: int) -> None:
        self._region = region
        self.base = base
        self.lkey = int(region.lkey)
        self.rkey = int(region.rkey)

    def close(self) -> None:
        """Deregister the memory."""
        with _translated("deregistering memory"):
            self._region.close()


class Device:
    """An opened device with a protection domain of its own.

    Attributes:
        port: port and address of the device.
    """

    def __init__(self, port: RdmaPort) -> None:
        verbs = _loaded()
        self.port = port
        with _translated(f"opening {port.device}"):
            self._context = verbs.device.Context(name=port.device)
            self.domain = verbs.pd.PD(self._context)

    @property
    def context(self) -> Any:
        """The pyverbs context."""
        return self._context

    def register(self, address: int, size: int, access: Access) -> Region:
        """Register memory of this process; the pages stay in place until the region is closed.

        Raises:
            TransportError: the kernel refused, for example because of the limit on locked memory.
        """
        verbs = _loaded()
        flags = _access_flags(verbs.enums, access)
        with _translated(f"registering {size} bytes with {self.port.device}"):
            return Region(verbs.mr.MR(self.domain, size, flags, address=address), address)

    def register_dmabuf(self, fd: int, size: int) -> Region:
        """Register memory of another device, for example a GPU, that was exported as a dmabuf.

        In pyverbs the first byte has address 0, whatever the address is elsewhere.

        Raises:
            TransportError: the device or its driver can't reach the memory.
        """
        verbs = _loaded()
        flags = _access_flags(verbs.enums, Access.LOCAL)
        with _translated(f"registering GPU memory with {self.port.device}"):
            return Region(verbs.mr.DmaBufMR(self.domain, size, flags, dmabuf=fd), 0)

    def close(self) -> None:
        """Close the domain and the device; close regions and queue pairs before."""
        with _translated(f"closing {self.port.device}"):
            self.domain.close()
            self._context.close()


class QueuePair:
    """One end of a reliable connection, with its completion queue; used by one thread at a time.

    After any error the queue pair is unusable: close the pair and make another.
    """

    def __init__(self, device: Device, *, depth: int, serves: bool) -> None:
        """Make a queue pair.

        Args:
            device: device of the queue pair.
            depth: maximum number of work requests in flight.
            serves: whether the peer may read and write our registered memory.
        """
        verbs = _loaded()
        self._enums = verbs.enums
        self._wr = verbs.wr
        self._addr = verbs.addr
        self._attr = verbs.qp.QPAttr
        self._device = device
        self._serves = serves
        self._psn = secrets.randbits(24)
        cap = verbs.qp.QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        with _translated(f"a queue pair on {device.port.device}"):
            self._cq = verbs.cq.CQ(device.context, depth)
            init = verbs.qp.QPInitAttr(
                qp_type=self._enums.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=0
            )
            self._qp = verbs.qp.QP(device.domain, init)
        self._opcodes = {
            Op.READ: self._enums.IBV_WR_RDMA_READ,
            Op.WRITE: self._enums.IBV_WR_RDMA_WRITE,
        }

    @property
    def address(self) -> QpAddress:
        """The data that the peer needs to connect."""
        port = self._device.port
        return QpAddress(port.gid, port.lid, self._qp.qp_num, self._psn, port.mtu, port.reads)

    def connect(self, peer: QpAddress) -> None:
        """Connect to a peer, ready to send to and to serve the peer.

        Raises:
            TransportError: the peer can't be reached.
        """
        e, port = self._enums, self._device.port
        attr = self._attr(port_num=port.port)
        attr.pkey_index = 0
        attr.qp_access_flags = (
            e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ if self._serves else 0
        )
        attr.path_mtu = min(port.mtu, peer.mtu)
        attr.dest_qp_num = peer.qp_num
        attr.rq_psn, attr.sq_psn = peer.psn, self._psn
        attr.max_rd_atomic = attr.max_dest_rd_atomic = min(port.reads, peer.reads)
        attr.min_rnr_timer, attr.rnr_retry = 12, 6
        attr.timeout, attr.retry_cnt = _TIMEOUT, _RETRIES
        with _translated(f"connecting {port.device} to {peer.gid}"):
            route = self._addr.GlobalRoute(
                dgid=self._addr.GID(peer.gid), sgid_index=port.gid_index, hop_limit=_HOPS
            )
            attr.ah_attr = self._addr.AHAttr(
                gr=route, is_global=1, port_num=port.port, dlid=peer.lid
            )
            self._qp.to_rts(attr)

    def post(
        self,
        op: Op,
        *,
        number: int,
        signalled: bool,
        local: tuple[int, int],
        remote: tuple[int, int],
        size: int,
    ) -> None:
        """Start an operation.

        Args:
            op: operation to start.
            number: number that the completion returns.
            signalled: whether a success also produces a completion.
            local: address and lkey.
            remote: address and rkey.
            size: bytes.

        Raises:
            TransportError: the queue pair is broken or full.
        """
        part = self._wr.SGE(local[0], size, local[1])
        request = self._wr.SendWR(
            wr_id=number,
            opcode=self._opcodes[op],
            num_sge=1,
            sg=[part],
            send_flags=self._enums.IBV_SEND_SIGNALED if signalled else 0,
        )
        request.set_wr_rdma(remote[1], remote[0])
        with _translated(f"posting to {self._device.port.device}"):
            self._qp.post_send(request)

    def poll(self, most: int = 16) -> list[Completion]:
        """Return finished requests, oldest first, without waiting."""
        with _translated(f"polling {self._device.port.device}"):
            _, found = self._cq.poll(most)
            return [Completion(int(wc.wr_id), _status_text(int(wc.status))) for wc in found]

    def close(self) -> None:
        """Destroy the pair; after the return the device touches no memory for this pair."""
        with _translated(f"closing a queue pair on {self._device.port.device}"):
            self._qp.close()
            self._cq.close()


@functools.cache
def _load() -> SimpleNamespace | str:
    """Import pyverbs; return the reason in words if the import fails."""
    try:
        names = ("addr", "cq", "device", "mr", "pd", "pyverbs_error", "qp", "wr")
        parts = {name: importlib.import_module(f"pyverbs.{name}") for name in names}
        try:
            enums = importlib.import_module("pyverbs.libibverbs_enums")
        except ImportError:
            enums = importlib.import_module("pyverbs.enums")  # Before version 50.
    except ImportError as error:
        return f"pyverbs can't be imported ({error}); run deploy/install-pyverbs.sh"
    return SimpleNamespace(enums=enums, **parts)


def _loaded() -> SimpleNamespace:
    verbs = _load()
    if isinstance(verbs, str):
        raise TransportError(verbs)
    return verbs


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn exceptions of pyverbs into a TransportError."""
    kind = _loaded().pyverbs_error.PyverbsError
    try:
        yield
    except (kind, OSError) as error:
        raise TransportError(f"{what}: {error}") from error


def _ports_of(verbs: SimpleNamespace, name: str) -> list[RdmaPort]:
    with _translated(f"opening {name}"):
        context = verbs.device.Context(name=name)
        try:
            limits = context.query_device()
            reads = max(1, min(_MAX_READS, int(limits.max_qp_rd_atom)))
            ports = []
            for number in range(1, int(limits.phys_port_cnt) + 1):
                state = context.query_port(number)
                gid = _choose_gid(verbs.enums, context, number, state)
                if state.state == verbs.enums.IBV_PORT_ACTIVE and gid is not None:
                    lid, mtu = int(state.lid), int(state.active_mtu)
                    ports.append(RdmaPort(name, number, *gid, lid=lid, mtu=mtu, reads=reads))
            return ports
        finally:
            context.close()


def _choose_gid(enums: Any, context: Any, port: int, state: Any) -> tuple[int, str] | None:
    """Return index and text of the address for peers: routable, RoCE v2 over IPv4."""
    if state.link_layer == enums.IBV_LINK_LAYER_INFINIBAND:
        return 0, str(context.query_gid(port, 0))
    for entry in context.query_gid_table(_MAX_GIDS):
        if entry.port_num == port and entry.gid_type == enums.IBV_GID_TYPE_ROCE_V2:
            gid = str(context.query_gid(port, entry.gid_index))
            if gid.startswith(_IPV4):
                return int(entry.gid_index), gid
    return None


def _access_flags(enums: Any, access: Access) -> int:
    flags = {
        Access.LOCAL: enums.IBV_ACCESS_LOCAL_WRITE,
        Access.READABLE: enums.IBV_ACCESS_REMOTE_READ,
        Access.SHARED: (
            enums.IBV_ACCESS_LOCAL_WRITE
            | enums.IBV_ACCESS_REMOTE_READ
            | enums.IBV_ACCESS_REMOTE_WRITE
        ),
    }
    return int(flags[access])


def _status_text(status: int) -> str:
    return "" if status == 0 else _STATUS.get(status, f"work completion status {status}")
