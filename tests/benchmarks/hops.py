"""Calls of our own functions in one training step, and the files that one collective passes.

    python tests/benchmarks/hops.py
    python tests/benchmarks/hops.py --ranks 1 --by-function 40

`sys.setprofile` counts the calls on rank 0 in one steady step of stage 3: forward, backward, AdamW
and `zero_grad` of 8 blocks with 52 parameters. An unshard lasts from the hook before a unit's
forward to its return, a gradient from autograd's hook to the issued reduction of its bucket.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here and in the ranks
sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

import lightning_zero
from lightning_zero import Engine, ZeroConfig
from tests.support.ranks import run_ranks

PACKAGE = str(Path(lightning_zero.__file__).parent) + "/"
WARMUP, WIDTH = 6, 16
# The function in which each begins, and the one that issues its collective.
SPANS = {
    "unshard": ("Hooks._pre_forward", "all_gather"),
    "gradient": ("post_acc", "reduce_scatter"),
}


class Block(nn.Module):
    """A norm and two layers: six parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Profile:
    """Counts calls of our own functions, in all and within the spans that issue a collective."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.files_by_span: dict[str, list[set[str]]] = {name: [] for name in SPANS}
        self._open: list[tuple[str, Any, set[str]]] = []  # name, frame, files
        self._has_issued = False

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "return":
            if self._open and self._open[-1][1] is frame:
                name, _, files = self._open.pop()
                if self._has_issued:
                    self.files_by_span[name].append(files)
            return
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        file = code.co_filename.removeprefix(PACKAGE)
        self.calls[f"{file} {code.co_qualname}"] += 1
        for name, (begin, issue) in SPANS.items():
            if begin in code.co_qualname and not self._open:
                self._open.append((name, frame, set()))
                self._has_issued = False
            if self._open and self._open[0][0] == name:
                self._has_issued |= code.co_name == issue
        for _, _, files in self._open:
            files.add(file)


def measure(rank: int, world_size: int) -> Profile:
    """Profiles one step of this rank."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(8)]
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks), nn.Linear(WIDTH, 1))
    module.forward = lambda x: module[2](nn.Sequential(*module[1])(module[0](x)))  # type: ignore[method-assign]
    optimizer = torch.optim.AdamW(module.parameters())
    engine = Engine(module, [optimizer], ZeroConfig(stage=3))
    profile = Profile()
    for step in range(WARMUP + 1):
        x = torch.randn(4, WIDTH)
        if step == WARMUP:
            sys.setprofile(profile)
        engine.backward(module(x).square().mean())
        engine.step()
        engine.zero_grad()
    sys.setprofile(None)
    engine.close()
    return profile


def main() -> None:
    """Reads the command line, runs, prints the counts of rank 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--by-function", type=int, default=0, help="so many functions, by calls")
    args = parser.parse_args()
    profile = run_ranks(args.ranks, measure)[0]
    files = Counter(name.partition(" ")[0] for name in profile.calls.elements())
    print(f"{profile.calls.total()} own calls in {len(files)} files: {dict(files.most_common())}")
    for name, spans in profile.files_by_span.items():
        sizes = sorted({len(span) for span in spans})
        print(f"{name}: {sizes} files; at most {sorted(max(spans, key=len, default=set()))}")
    for name, count in profile.calls.most_common(args.by_function):
        print(f"{count:6d} {name}")


if __name__ == "__main__":
    main()
