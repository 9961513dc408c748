"""Records file operations of processes in a folder, and simulates crashes between them.

    Recording    records operations in each process by Python's audit events
    _Disk        names and data of the folder, synced to the disk or not
    crashes      trees that a kill or a power failure after each operation may leave

A simulated power failure is worse than that of any file system: any part of the data that was not
synced may be on the disk, in any order; only one operation on names is atomic.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Recording", "crashes", "operations_in", "read_tree", "write_tree"]

Operation = tuple[Any, ...]  # time, verb, paths below the folder or contents
Tree = dict[str, Any]  # bytes of a file, a tree of a directory, by name


class Recording:
    """File operations of this process below `root`, from now until its end."""

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root)
        self._operations: list[Operation] = []
        self._lock = threading.Lock()
        sys.addaudithook(self._on_event)  # it cannot be removed again
        fsync, fdatasync = os.fsync, os.fdatasync
        os.fsync = lambda file: self._synced(file, fsync(file))
        os.fdatasync = lambda file: self._synced(file, fdatasync(file))

    def save(self, path: Path) -> None:
        """Writes the recorded operations, for `operations_in`."""
        with self._lock:
            path.write_bytes(pickle.dumps(self._operations))

    def _note(self, verb: str, *rest: Any) -> None:
        if rest[0] is not None:
            with self._lock:
                self._operations.append((time.monotonic_ns(), verb, *rest))

    def _below(self, path: Any, folder: int = -1) -> str | None:
        if isinstance(path, int):
            return None
        base = os.getcwd() if folder in (-1, None) else os.readlink(f"/proc/self/fd/{folder}")
        absolute = os.path.normpath(os.path.join(base, os.fsdecode(path)))
        absolute = os.path.join(
            os.path.realpath(os.path.dirname(absolute)), os.path.basename(absolute)
        )
        inside = absolute == self._root or absolute.startswith(f"{self._root}/")
        return os.path.relpath(absolute, self._root) if inside else None

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "os.mkdir" and self._below(args[0], args[2]) == ".":
            return  # the folder itself
        if event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT:
            self._note("create", self._below(args[0]), bool(args[2] & os.O_TRUNC))
        elif event == "os.mkdir":
            self._note("mkdir", self._below(args[0], args[2]))
        elif event == "os.rename":
            self._note("rename", self._below(args[0], args[2]), self._below(args[1], args[3]))
        elif event == "os.remove":
            self._note("remove", self._below(args[0], args[1]))
        elif event == "os.rmdir":
            self._note("rmdir", self._below(args[0], args[1]))

    def _synced(self, file: Any, result: None) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            self._note("sync names", self._below(path))
        elif os.path.exists(path):
            self._note("sync data", self._below(path), Path(path).read_bytes())


def operations_in(logs: list[Path]) -> list[Operation]:
    """Operations of all processes in order; before each sync of a file, half of it is written."""
    ordered = sorted(one for log in logs for one in pickle.loads(log.read_bytes()))
    operations: list[Operation] = []
    for _, verb, *rest in ordered:
        if verb == "sync data":
            operations.append(("write", rest[0], rest[1][: len(rest[1]) // 2]))
            operations.append(("write", *rest))
        operations.append((verb, *rest))
    return operations


# ------------------------------------------------------------------------------- names and data


@dataclass(eq=False)
class _Inode:
    data: bytes = b""
    synced: bytes = b""


@dataclass(eq=False)
class _Directory:
    names: dict[str, _Inode | _Directory] = field(default_factory=dict)
    synced: dict[str, _Inode | _Directory] = field(default_factory=dict)


_Change = list[tuple[_Directory, str, Any]]  # names that one operation sets or removes (None)


class _Disk:
    def __init__(self, tree: Tree) -> None:
        self.root = _of_tree(tree)
        self.pending: list[_Change] = []

    def apply(self, verb: str, path: str, *rest: Any) -> None:
        """Applies an operation; one that failed originally changes nothing."""
        if verb == "sync names":
            self._sync(self._at(path))
            return
        folder, name = self._at(os.path.dirname(path)), os.path.basename(path)
        there = folder.names.get(name)
        if verb == "create":
            if there is None:
                self._change((folder, name, _Inode()))
            elif rest[0]:
                there.data = b""
        elif verb == "write":
            there.data = rest[0]
        elif verb == "sync data":
            there.data = there.synced = rest[0]
        elif verb == "mkdir":
            if there is None:
                self._change((folder, name, _Directory()))
        elif verb == "rename":
            self._move(folder, name, there, rest[0])
        elif verb == "remove" or (verb == "rmdir" and there is not None and not there.names):
            self._change((folder, name, None))

    def _move(self, folder: _Directory, name: str, there: Any, path: str) -> None:
        other, new = self._at(os.path.dirname(path)), os.path.basename(path)
        old = other.names.get(new)
        is_in_the_way = old is not None and (
            bool(getattr(old, "names", None))
            or isinstance(old, _Directory) != isinstance(there, _Directory)
        )
        if there is not None and not is_in_the_way:
            self._change((folder, name, None), (other, new, there))

    def _at(self, path: str) -> Any:
        found: Any = self.root
        for part in Path(path).parts:
            found = found.names[part]
        return found

    def _change(self, *change: tuple[_Directory, str, Any]) -> None:
        _set(list(change), "names")
        self.pending.append(list(change))

    def _sync(self, directory: _Directory) -> None:
        """Syncs the directory, with all operations on its names."""
        for change in self.pending:
            if any(folder is directory for folder, _, _ in change):
                _set(change, "synced")
        self.pending = [c for c in self.pending if all(f is not directory for f, _, _ in c)]

    def after_kill(self) -> Tree:
        return _tree(self.root, "names", lambda file: file.data)

    def after_power_failure(self, generator: random.Random | None) -> Tree:
        """Content without unsynced data; with a generator, a random part of that is on the disk."""
        if generator is None:
            return _tree(self.root, "synced", lambda file: file.synced)

        def data(file: _Inode) -> bytes:
            zeros = bytes(len(file.data))
            return generator.choice([file.data, file.synced, zeros if not file.synced else b""])

        kept = [(folder, dict(folder.synced)) for folder in _directories(self.root)]
        for change in self.pending:
            for folder, _, _ in change:
                if all(folder is not one for one, _ in kept):
                    kept.append((folder, dict(folder.synced)))
            if generator.random() < 0.5:
                _set(change, "synced")
        tree = _tree(
            self.root, "synced", lambda file: data(file) if file.data != file.synced else file.data
        )
        for folder, names in kept:
            folder.synced = names
        return tree


def _set(change: _Change, which: str) -> None:
    for folder, name, inode in change:
        names = getattr(folder, which)
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


def _of_tree(tree: Tree) -> _Directory:
    names = {n: _of_tree(v) if isinstance(v, dict) else _Inode(v, v) for n, v in tree.items()}
    return _Directory(dict(names), dict(names))


def _tree(directory: _Directory, which: str, data: Any) -> Tree:
    return {
        name: _tree(inode, which, data) if isinstance(inode, _Directory) else data(inode)
        for name, inode in getattr(directory, which).items()
    }


def _directories(directory: _Directory) -> Iterator[_Directory]:
    yield directory
    for inode in {
        id(i): i for i in (*directory.names.values(), *directory.synced.values())
    }.values():
        if isinstance(inode, _Directory):
            yield from _directories(inode)


# -------------------------------------------------------------------------------------- crashes


def crashes(
    before: Tree, operations: list[Operation], num_random: int
) -> Iterator[tuple[str, Tree]]:
    """Yields the trees that crashes may leave, without duplicates, with descriptions.

    The last one is a power failure after the last operation.

    Args:
        before: Content of the folder before, all of it synced.
        operations: Result of `operations_in`.
        num_random: Power failures per operation that keep a random part of the unsynced data.
    """
    disk = _Disk(before)
    seen: set[bytes] = set()
    for number, operation in enumerate(operations):
        disk.apply(*operation)
        words = f"after operation {number + 1} of {len(operations)}, {operation[:2]}"
        left = [("killed", disk.after_kill()), ("power failure", disk.after_power_failure(None))]
        for seed in range(num_random):
            generator = random.Random(number * 1000 + seed)
            left.append((f"power failure {seed}", disk.after_power_failure(generator)))
        for kind, tree in left:
            key = pickle.dumps(_sorted(tree))
            if key not in seen:
                seen.add(key)
                yield f"{kind} {words}", tree
    yield "power failure at the end", disk.after_power_failure(None)


def _sorted(tree: Tree) -> list[Any]:
    return [(n, _sorted(v) if isinstance(v, dict) else v) for n, v in sorted(tree.items())]


def write_tree(tree: Tree, folder: Path) -> None:
    """Creates `folder` with the content `tree`."""
    folder.mkdir()
    for name, value in tree.items():
        if isinstance(value, dict):
            write_tree(value, folder / name)
        else:
            (folder / name).write_bytes(value)


def read_tree(folder: Path) -> Tree:
    """Inverse of `write_tree`; an empty tree if the folder does not exist."""
    if not folder.exists():
        return {}
    return {
        path.name: read_tree(path) if path.is_dir() else path.read_bytes()
        for path in folder.iterdir()
    }
