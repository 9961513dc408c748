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
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Entry", "Link"]

Entry = dict[str, Any]  # an entry of the log; it has a "kind"; "by" is the rank that has sent it

_CONNECT_S = 5.0  # for each address of rank 0
_SEND_S = 3.0  # limit for a process that receives nothing, and whose buffer is full
_MAX_BYTES = 2**20  # of a line
# A connection that is idle for days stays open on the way, and ends ten minutes after its node.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 60, "TCP_KEEPCNT": 9}  # s, s, probes
_TO_RANK_0 = ("status",)  # kinds of entries that rank 0 does not send on

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
        self.rank = rank  # None: it has not said yet who it is
        self.received = b""  # the begin of a line

    def greet(self, rank: int, log: bytes) -> None:
        """The other process is `rank`: sends it the log."""
        self.rank = rank
        self.send(log)

    def send(self, line: bytes) -> None:
        with suppress(OSError):  # the other process has ended: its end is read
            self.socket.sendall(line)

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
    """

    def __init__(self, rank: int, store: Any, key: str) -> None:
        self._rank = rank
        self._lock = threading.Lock()  # of all that is sent, and of `_unread`
        self._connections: list[_Connection] = []  # of rank 0: to all others; else: to rank 0
        self._listener: socket.socket | None = None  # of rank 0
        self._secret = b""
        self._sent: list[bytes] = []  # rank 0: the log, for ranks that connect later
        self._unread: list[Entry] = []
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        hello = {"kind": "here", "pid": os.getpid(), "node": _node()}
        if rank == 0:
            self._listen(store, key)
        else:
            self._connect(json.loads(store.get(key)), getattr(_server_of(store), "host", None))
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
        address = {"port": self._listener.getsockname()[1], "host": socket.gethostname()}
        store.set(key, json.dumps(address | {"node": _node(), "secret": self._secret.decode()}))

    def _connect(self, to: dict[str, Any], store_host: str | None) -> None:
        hosts = ["localhost"] if to["node"] == _node() else [store_host, to["host"]]
        errors = []
        for host in filter(None, hosts):
            try:
                made = socket.create_connection((host, to["port"]), _CONNECT_S)
            except OSError as error:
                errors.append(f"{host}:{to['port']}: {error}")
                continue
            self._add(made, rank=0).send(f"{to['secret']} {self._rank}\n".encode())
            return
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
            else:
                self._connections[0].send(_line(entry))

    def wake(self) -> None:
        """Ends a `read` that waits."""
        with suppress(OSError):
            self._waker.send(b"!")

    def _append(self, entry: Entry) -> None:
        """Sends an entry to all ranks that are connected to this one. The caller holds the lock."""
        if entry["kind"] not in _TO_RANK_0:
            line = _line(entry)
            self._sent.append(line)
            for connection in self._connections:
                if connection.rank is not None:
                    connection.send(line)
        self._unread.append(entry)
        self.wake()

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
        with self._lock:
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
        if not hmac.compare_digest(secret, self._secret):
            _log.warning("a connection that is not from a rank of this job is closed: %.80r", line)
            self._end(connection)
            return False
        with self._lock:
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


def _node() -> str:
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
