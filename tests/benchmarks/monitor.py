"""What ZeroMonitor costs: times of training steps with it and without it, in one run on gloo ranks.

    python tests/benchmarks/monitor.py
    python tests/benchmarks/monitor.py --size 2m --stage 2 --rounds 20

One fit takes turns of ten steps: without the monitor, with one step of ten recorded and logged, as
in the example, and with every step so. Their order rotates by one every round, so that whatever
else the machine does affects all of them equally. The time of a turn is that of the slowest rank,
from its first batch to the first of the next turn; the ratio is the median of those within a round.
The processor's time, of all threads of a rank, is the steadier number on a machine that others
share.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here and in the ranks

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from examples.gpt import GPT
from lightning_zero.observe.monitor import FitMonitor, RecordedStep
from lightning_zero.observe.windows import MonitorConfig
from tests.benchmarks.report import BATCH, SIZES
from tests.benchmarks.systems import ADAMW
from tests.support.fitting import make_trainer
from tests.support.ranks import run_ranks

TURN = 10  # steps
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
MODES = {"without": None, "one step of ten": TURN, "every step": 1}  # every so many steps


def main() -> None:
    """Reads the command line, runs, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds (default 8)")
    parser.add_argument("--ranks", type=int, default=2, help="gloo ranks (default 2)")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="25m")
    args = parser.parse_args()
    settings = (args.stage, args.size, args.rounds)
    ranks = run_ranks(args.ranks, _fit, *settings, has_group=False, timeout_s=3600)
    print(
        f"GPT of {args.size} parameters, stage {args.stage}, {args.ranks} ranks, one thread each, "
        f"{args.rounds} rounds of {TURN} steps, torch {torch.__version__}"
    )
    print(f"{'recorded':<16}{'ms / step':>10}{'ratio':>8}{'quartiles':>16}{'cpu':>8}{'ratio':>8}")
    for mode in MODES:
        print(f"{mode:<16}" + "".join(_columns(ranks, mode, what) for what in ("wall", "cpu")))


def _columns(ranks: list[dict[str, Any]], mode: str, what: str) -> str:
    """Median of the slowest rank, or of the mean over ranks of what all its threads used."""
    of_ranks = max if what == "wall" else statistics.fmean
    times, base = (
        [of_ranks(of_turn) for of_turn in zip(*(rank[what][m] for rank in ranks), strict=True)]
        for m in (mode, "without")
    )
    ratios = [time / alone for time, alone in zip(times, base, strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
    spread = f"{low:.3f} - {high:.3f}"
    median = statistics.median(times) * 1e3
    if what == "cpu":
        return f"{median:>8.1f}{ratio:>8.3f}"
    return f"{median:>10.1f}{ratio:>8.3f}{spread:>16}"


class Training(LightningModule):
    """The example's GPT on random tokens."""

    def __init__(self, size: str, num_batches: int) -> None:
        super().__init__()
        self.gpt = GPT(SIZES[size])
        self.num_batches = num_batches

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (ids,) = batch
        return F.cross_entropy(self.gpt(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **ADAMW)

    def train_dataloader(self) -> DataLoader[Any]:
        shape = (self.num_batches * BATCH * self.trainer.world_size, self.gpt.config.context + 1)
        ids = torch.randint(self.gpt.config.vocab_size, shape)
        return DataLoader(TensorDataset(ids), batch_size=BATCH)


class Turns(Callback):
    """Lets each mode watch its turns, and takes their times.

    Attributes:
        times: Seconds of a step, and of the processor, by mode and round, but for the first round.
    """

    def __init__(self, rounds: int) -> None:
        modes = list(MODES)
        self.order = [
            modes[(i + k) % len(modes)] for i in range(rounds + 1) for k in range(len(modes))
        ]
        self.times: dict[str, dict[str, list[float]]] = {
            what: {mode: [] for mode in modes} for what in _CLOCKS
        }
        self.counts = dict.fromkeys(modes, 0)  # steps of each so far
        self.began: dict[str, float] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.watches = {
            mode: FitMonitor(
                trainer.strategy,
                MonitorConfig(every),
                folder=Path("zero"),
                progress=(0, 0),
            )
            for mode, every in MODES.items()
            if every is not None
        }

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        turn = batch_idx // TURN
        if batch_idx % TURN == 0:
            now = {what: clock() for what, clock in _CLOCKS.items()}
            for what in _CLOCKS if turn > len(MODES) else ():
                self.times[what][self.mode].append((now[what] - self.began[what]) / TURN)
            self.mode, self.began = self.order[turn % len(self.order)], now
        if watch := self.watches.get(self.mode):
            count = self.counts[self.mode]
            self._log(trainer, watch.before_batch(count, count))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if watch := self.watches.get(self.mode):
            watch.before_step(optimizer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        watch = self.watches.get(self.mode)
        if watch is None:
            return
        count = self.counts[self.mode]
        self.counts[self.mode] += 1
        watch.after_batch(batch, count, count + 1)
        if batch_idx % TURN == TURN - 1:
            self._log(trainer, watch.last())

    def _log(self, trainer: Any, watched: RecordedStep | None) -> None:
        if watched is not None:
            trainer.logger.log_metrics(watched.metrics, step=watched.num_batches)


def _fit(rank: int, world_size: int, stage: int, size: str, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    turns = Turns(rounds)
    num_batches = len(turns.order) * TURN + 1  # the last one ends the last turn
    trainer = make_trainer(
        {"stage": stage}, callbacks=[turns], logger=CSVLogger("."), log_every_n_steps=TURN
    )
    trainer.fit(Training(size, num_batches))
    return turns.times


if __name__ == "__main__":
    main()
