"""The two libraries of the fake device, built by a C++ compiler."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

__all__ = ["build"]

_HERE = Path(__file__).parent
_SOURCES = ("accelerator", "device")


def build(compiler: str, folder: Path) -> Path:
    """The folder of the libraries; built once for each version of the sources and of torch."""
    texts = [(_HERE / f"{name}.cpp").read_text() for name in _SOURCES]
    digest = hashlib.sha256("\n".join([*texts, torch.__version__, compiler]).encode())
    target = folder / digest.hexdigest()[:16]
    if target.exists():
        return target
    built = Path(tempfile.mkdtemp(dir=folder))
    flags = ["-O1", "-shared", "-fPIC", "-std=c++20"]
    flags += [f"-I{path}" for path in cpp_extension.include_paths()]
    linked = [f"-L{path}" for path in cpp_extension.library_paths()]
    linked += [f"-Wl,-rpath,{path}" for path in cpp_extension.library_paths()]
    libraries = {"accelerator": ["-ldl"], "device": [*linked, "-lc10", "-ltorch_cpu"]}
    for name in _SOURCES:
        output = str(built / f"lib{name}.so")
        source = str(_HERE / f"{name}.cpp")
        subprocess.run([compiler, *flags, source, "-o", output, *libraries[name]], check=True)
    try:
        built.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(built)
    return target
