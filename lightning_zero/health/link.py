"""Connection of every rank to rank 0: a log whose entries all ranks read in one order.

    rank k   send(entry)   a line of JSON to rank 0
    rank 0   read()        takes the lines as they arrive, and sends each to all ranks
    rank k   read()        the entries of all ranks, its own among them, in the order of rank 0

The end of a connection is the end of a process: the kernel closes it, whatever has ended the
process. A fork, such as a worker of a DataLoader, closes its copies at once. Rank 0 listens on a
port that the kernel chooses; its address, and a secret that every connection begins with, are in
the store of the ranks' rendezvous.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Entry", "Link", "node_of_process"]

Entry = dict[str, Any]  # an entry of the log; it has a "kind"; "by" is the rank that has sent it

_CONNECT_S = 5.0  # for each address of rank 0
_GREET_S = 30.0  # for the first line of rank 0, which may be busy
_SEND_S = 3.0  # limit for a process that receives nothing, and whose buffer is full
_LOOK_S = 0.02  # between the first two looks into the store
_MAX_LOOK_S = 1.0  # later: one process answers all ranks
_WARN_S = 30.0  # of waiting for rank 0
_MAX_BYTES = 2**20  # of a line
# A connection that is idle for days stays open on the way, and ends ten minutes after its node.
_KEEP_ALIVE = {  # s, s, probes, ms
    **{"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 60, "TCP_KEEPCNT": 9},
    "TCP_USER_TIMEOUT": 600_000,
}
_TO_RANK_0 = ("status", "meet")  # kinds of entries that rank 0 does not send on

_log = logging.getLogger(__name__)
_links: weakref.WeakSet[Link] = weakref.WeakSet()


class _Connection:
    """A connection to another rank."""

    def __init__(self, to: socket.socket, rank: int | None) -> None:
        to.settimeout(_SEND_S)
        to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        to.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                to.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket = to
        self.made_at = time.monotonic()
        self.rank = rank  # None: it has not said yet who it is
        self.received = b""  # the beginning of a line

    def greet(self, rank: int, log: bytes) -> None:
        """The other process is `rank`: sends it the log."""
        self.rank = rank
        self.send(log)

    def send(self, line: bytes) -> None:
        try:
            self.socket.sendall(line)
        except OSError:  # it has ended, or a part of the line was sent: its end is read
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def receive(self) -> list[bytes] | None:
        """The lines that have arrived; None: the connection has ended."""
        try:
            found = self.socket.recv(2**16)
        except OSError:
            found = b""
        *lines, self.received = (self.received + found).split(b"\n")
        return lines if found and len(self.received) < _MAX_BYTES else None


class Link:
    """This rank's end of the connections. Every rank makes one, rank 0 first. Collective.

    Args:
        rank: Rank of this process.
        store: The store of the ranks' rendezvous.
        key: Key of rank 0's address in it, the same on every rank.

    Raises:
        OSError: This rank cannot connect to rank 0.
        RuntimeError: Rank 0 has made none in the time of the store.
    """

    def __init__(self, rank: int, store: Any, key: str) -> None:
        self._rank = rank
        self._lock = threading.Lock()  # of all that is sent, and of `_unread`
        self._connections: list[_Connection] = []  # of rank 0: to all others; else: to rank 0
        self._listener: socket.socket | None = None  # of rank 0
        self._secret = b""
        self._sent: list[bytes] = []  # rank 0: the log, for ranks that connect later
        self._unsent: list[bytes] = []  # rank 0: what is sent to all at the end of a `read`
        self._unread: list[Entry] = []
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        hello = {"kind": "here", "pid": os.getpid(), "node": node_of_process()}
        if rank == 0:
            self._listen(store, key)
        else:
            self._connect(self._address(store, key), getattr(_server_of(store), "host", None))
        _links.add(self)
        self.send(hello)

    def _listen(self, store: Any, key: str) -> None:
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, backlog=1024, dualstack_ipv6=is_dual
        )
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._secret = secrets.token_hex(16).encode()
        address = {
            "port": self._listener.getsockname()[1],
            "host": socket.gethostname(),
            "node": node_of_process(),
            "secret": self._secret.decode(),
        }
        store.set(key, json.dumps(address))

    def _address(self, store: Any, key: str) -> dict[str, Any]:
        """Waits in the store for the address of rank 0."""
        awaited = "rank 0, which has not set up a Trainer, Fabric or Engine"
        text = f"rank {self._rank} waits for {awaited}"
        until = time.monotonic() + store.timeout.total_seconds()
        warn_at, pause = time.monotonic() + _WARN_S, _LOOK_S
        while not store.check([key]):
            if time.monotonic() > until:
                raise RuntimeError(
                    f"{text} in {store.timeout.total_seconds():g} s, or has ended; every rank must "
                    "set up the same ones, in the same order."
                )
            if time.monotonic() > warn_at:
                warn_at = until
                _log.warning("%s for %g s.", text, _WARN_S)
            time.sleep(pause)
            pause = min(1.5 * pause, _MAX_LOOK_S)
        found: dict[str, Any] = json.loads(store.get(key))
        return found

    def _connect(self, to: dict[str, Any], store_host: str | None) -> None:
        hosts = [store_host, "localhost" if to["node"] == node_of_process() else None, to["host"]]
        errors = []
        for host in filter(None, hosts):  # a node may have several network namespaces
            try:
                made = socket.create_connection((host, to["port"]), _CONNECT_S)
            except OSError as error:
                errors.append(f"{host}:{to['port']}: {error}")
                continue
            try:
                made.sendall(f"{to['secret']} {self._rank}\n".encode())
                made.settimeout(_GREET_S)
                if made.recv(1, socket.MSG_PEEK) == b"{":  # another program would close, or wait
                    self._add(made, rank=0)
                    return
                errors.append(f"{host}:{to['port']}: another program answers")
            except OSError as error:
                errors.append(f"{host}:{to['port']}: {error}")
            made.close()
        raise OSError(
            f"rank {self._rank} cannot connect to rank 0 ({'; '.join(errors)}): all ports must be "
            "open between the nodes of a job, as for gloo and NCCL; and rank 0 must run."
        )

    def _add(self, made: socket.socket, rank: int | None) -> _Connection:
        connection = _Connection(made, rank)
        self._connections.append(connection)
        self._selector.register(made, selectors.EVENT_READ, connection)
        return connection

    # ---------------------------------------------------------------- from any thread

    def send(self, entry: Entry) -> None:
        """Appends an entry to the log. After the end of rank 0 this rank alone reads it."""
        with self._lock:
            if self._rank == 0 or not self._connections:
                self._append({**entry, "by": self._rank})
                self._send_to_all()
            else:
                self._connections[0].send(_line(entry))

    def wake(self) -> None:
        """Ends a `read` that waits."""
        with suppress(OSError):
            self._waker.send(b"!")

    def _append(self, entry: Entry) -> None:
        """Appends an entry to the log of this rank. The caller holds the lock."""
        if entry["kind"] not in _TO_RANK_0:
            self._unsent.append(_line(entry))
        self._unread.append(entry)
        self.wake()

    def _send_to_all(self) -> None:
        """Sends new entries to the ranks that are connected. The caller holds the lock."""
        lines, self._unsent = self._unsent, []
        self._sent += lines
        for connection in self._connections if lines else ():
            if connection.rank is not None:
                connection.send(b"".join(lines))

    # ---------------------------------------------------------------- from one thread

    def read(self, seconds: float) -> list[Entry]:
        """Returns what is new in the log; waits for it at most `seconds`.

        An entry `closed` with a "rank" is not in the log: this rank's connection to that rank has
        ended.
        """
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._woken:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif key.fileobj is self._listener:
                with suppress(OSError):
                    self._add(self._listener.accept()[0], rank=None)
            else:
                self._receive(key.data)
        late = time.monotonic() - _GREET_S
        for connection in [c for c in self._connections if c.rank is None and c.made_at < late]:
            self._end(connection)
        with self._lock:
            self._send_to_all()
            unread, self._unread = self._unread, []
        return unread

    def _receive(self, connection: _Connection) -> None:
        lines = connection.receive()
        if lines is None:
            self._end(connection)
            return
        for line in lines:
            if self._rank == 0 and connection.rank is None:
                if not self._greet(connection, line):
                    return
            elif (entry := _entry(line)) is not None:
                with self._lock:
                    if self._rank == 0:
                        self._append({**entry, "by": connection.rank})
                    else:
                        self._unread.append(entry)

    def _greet(self, connection: _Connection, line: bytes) -> bool:
        """Takes the first line of a connection; whether it is that of a rank."""
        secret, _, rank = line.partition(b" ")
        if not (hmac.compare_digest(secret, self._secret) and rank.isdigit()):
            _log.warning("a connection that is not from a rank of this job is closed: %.80r", line)
            self._end(connection)
            return False
        with self._lock:
            self._send_to_all()
            connection.greet(int(rank), b"".join(self._sent))
        return True

    def _end(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        with self._lock:
            self._connections.remove(connection)
            connection.socket.close()
            if connection.rank is not None:
                self._unread.append({"kind": "closed", "rank": connection.rank})

    def close_in_fork(self) -> None:
        """Closes the copies of a fork; its parent keeps its own."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self.close()

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._connections:
            connection.socket.close()
        self._connections = []
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        self._waker.close()
        self._woken.close()


def _close_in_fork() -> None:
    for link in list(_links):
        link.close_in_fork()


os.register_at_fork(after_in_child=_close_in_fork)


def _line(entry: Entry) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _entry(line: bytes) -> Entry | None:
    """The entry of a line; None: no rank of this program has written it."""
    with suppress(ValueError):
        entry = json.loads(line)
        if isinstance(entry, dict) and isinstance(entry.get("kind"), str):
            return entry
    _log.warning("a line from another rank is not readable and is skipped: %.200r", line)
    return None


def node_of_process() -> str:
    """An id that is equal for processes that share process ids: boot and pid namespace."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _server_of(store: Any) -> Any:
    """The store below all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
