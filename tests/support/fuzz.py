"""Creates random pickles and checks that reading one only returns or raises.

A sequence of opcodes is drawn from all opcodes of pickle, with fitting arguments: names of classes
that a checkpoint may contain and of functions that it must not call, states that replace
attributes. Half of the sequences come from a real file, with some opcodes changed.
"""

import builtins
import os
import pathlib
import pickle
import pickletools
import random
import struct
import sys

import torch
from torch.distributed.checkpoint import filesystem, metadata

_ASKED_FOR = [
    *(("torch.distributed.checkpoint.metadata", name) for name in metadata.__all__),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath")),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *(("os", name) for name in ("system", "mkdir", "remove")),
    *(("builtins", name) for name in ("eval", "exec", "open", "setattr", "getattr", "list")),
    ("torch", "_inductor.config"),
    ("subprocess", "Popen"),
    ("xmlrpc.client", "ServerProxy"),
]
_TEXTS = ["parent", "fqn", "offset", "state_dict_metadata", "dtype", "__class__", "__dict__", "x"]
_NAMESPACES = [builtins, os, pathlib, pickle, torch.Size, filesystem, metadata]
_NAMESPACES += [value for value in vars(metadata).values() if isinstance(value, type)]
_NAMESPACES += [getattr(pathlib, name) for name in ("Path", "PosixPath", "PurePosixPath")]
_NAMESPACES += [filesystem._StorageInfo, torch.dtype, torch.serialization, torch]


def attributes():
    """Attributes of the modules and classes that a pickle may name, by name."""
    return [dict(vars(space)) for space in _NAMESPACES]


# ------------------------------------------------------------------------------------- pickles


def _text(draw):
    return draw.choice([*_TEXTS, *(word for pair in _ASKED_FOR for word in pair)]).encode()


def _number(draw, limit):
    return draw.choice([0, 1, 2, 7, draw.randrange(limit), limit - 1])


def _sized(length, data):
    return struct.pack({1: "<B", 4: "<I", 8: "<Q"}[length], len(data)) + data


def _argument(opcode, draw):
    """Random argument of an opcode, as bytes."""
    kind = opcode.arg.name if opcode.arg else ""
    if kind == "stringnl_noescape_pair":
        return b"".join(word.encode() + b"\n" for word in draw.choice(_ASKED_FOR))
    for length in (1, 4, 8):
        if kind in (f"{of}{length}" for of in ("unicodestring", "bytes", "string", "bytearray")):
            text = _text(draw)
            if draw.random() < 0.05:  # more than there is
                return struct.pack({1: "<B", 4: "<I", 8: "<Q"}[length], 255)
            return _sized(length, text)
    sizes = {"uint1": 1, "uint2": 2, "uint4": 4, "uint8": 8, "int4": 4}
    if kind in sizes:
        limit = 2 ** (8 * sizes[kind] - 1) if draw.random() < 0.1 else 30
        return _number(draw, limit).to_bytes(sizes[kind], "little")
    if kind in ("long1", "long4"):
        return _sized(int(kind[-1]), _number(draw, 2**60).to_bytes(9, "little"))
    if kind == "float8":
        return struct.pack(">d", draw.random())
    if kind.startswith(("decimalnl", "floatnl")):
        return b"%d\n" % _number(draw, 30)
    return b"'" + _text(draw) + b"'\n" if kind else b""


def _opcode(draw):
    opcode = draw.choice(pickletools.opcodes)
    return opcode.code.encode("latin-1") + _argument(opcode, draw)


def _global(draw):
    module, name = (word.encode() for word in draw.choice(_ASKED_FOR))
    return b"\x8c" + _sized(1, module) + b"\x8c" + _sized(1, name) + b"\x93"


def attack(draw):
    """Opcodes that set attributes of a global or call it, and leave it on the stack."""
    texts = [b"\x8c" + _sized(1, _text(draw)) for _ in range(2)]
    state = b"}(" + texts[0] + texts[1] + b"u"
    return draw.choice(
        [
            _global(draw) + b"N" + state + b"\x86b",
            _global(draw) + state + b"b",
            _global(draw) + texts[0] + b"\x85R",
            _global(draw) + b")\x81" + state + b"b",
            _global(draw) + _global(draw) + b"\x85R",
        ]
    )


def _changed(opcodes, draw):
    opcodes = list(opcodes)
    for _ in range(draw.choice([1, 1, 2, 3, 6])):
        at = draw.randrange(len(opcodes))
        other = draw.randrange(len(opcodes))
        how = draw.randrange(6)
        if how == 0:
            del opcodes[at]
        elif how == 1:
            opcodes.insert(at, opcodes[other])
        elif how == 2:
            opcodes[at], opcodes[other] = opcodes[other], opcodes[at]
        elif how == 3:
            opcodes[at] = _opcode(draw)
        elif how == 4:
            opcodes.insert(at, attack(draw) + b"0")
        else:
            opcodes[at] = attack(draw)
    return opcodes


def opcodes_of(data):
    """Bytes of each opcode of a pickle."""
    starts = [place for _, _, place in pickletools.genops(data)]
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]


def pickles(real, seed, count):
    """`count` byte strings, half of them the pickle `real` with changes."""
    draw = random.Random(seed)
    real = opcodes_of(real)
    for number in range(count):
        if number % 2:
            made = b"".join(_changed(real, draw))
        else:
            steps = [draw.choice([_opcode, _opcode, _opcode, _global, attack]) for _ in range(25)]
            made = b"\x80\x04" + b"".join(step(draw) for step in steps[: draw.randrange(1, 25)])
            made += b"."
        yield made[: draw.randrange(len(made))] if draw.random() < 0.02 else made


# ------------------------------------------------------------------------------------- watching


class Watch:
    """Records the process's audit events; it cannot be removed again."""

    def __init__(self):
        self.seen = []
        self._is_on = False
        sys.addaudithook(self._note)

    def _note(self, event, arguments):
        if not self._is_on or event in ("builtins.id", "object.__getattr__"):
            return
        is_reading = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        is_loaded = event == "import" and arguments[0] in sys.modules
        if not is_reading and not is_loaded:
            self.seen.append((event, repr(arguments)[:200]))

    def __enter__(self):
        self._is_on = True
        return self

    def __exit__(self, *_):
        self._is_on = False


def find_violations(read, made):
    """Forbidden actions of `read` for the byte strings in `made`."""
    watch = Watch()
    before = [*attributes(), dict(sys.modules)]
    found = []
    for data in made:
        try:
            with watch:
                read(data)
        except ValueError:
            pass
        except BaseException as error:
            found.append((f"{type(error).__name__}: {error}", data))
        found += [(seen, data) for seen in watch.seen]
        watch.seen.clear()
        after = [*attributes(), dict(sys.modules)]
        if after != before:
            names = [
                k
                for x, y in zip(before, after, strict=True)
                for k in x.keys() | y.keys()
                if x.get(k) is not y.get(k)
            ]
            found.append((f"changed {names}", data))
            before = after
    return found
