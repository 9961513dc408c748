"""Memory of each rank by stage, measured, beside the formula; draws the picture of the first page.

    python tests/benchmarks/memory_by_stage.py
    python tests/benchmarks/memory_by_stage.py --precision bf16 --picture bf16.png

Trains a GPT for three steps with AdamW in every stage on gloo ranks, each stage in fresh processes,
and counts, with the gradients still there, the storages of all live tensors above those that a rank
had before the model was built. The engine's report gives the bytes of each state; the sum of
the report is printed beside the count.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.nn import functional as F

import lightning_zero
from examples.gpt import GPT
from lightning_zero.layout.sizes import byte_unit
from lightning_zero.layout.stage import STAGES, State
from lightning_zero.observe.plots import INK, STATE_COLOURS, blank_figure
from tests.benchmarks.report import SIZES
from tests.support.ranks import run_ranks
from tests.support.storage import live_storage_bytes

OUTLINE = {"fill": False, "edgecolor": INK, "linestyle": (0, (4, 2)), "linewidth": 1.0}
PICTURE = Path(__file__).with_name("memory_by_stage.png")
# Bytes of a parameter in plain data parallel. The optimizer's are two moments, and the float32
# master where the parameter is not one itself.
BYTES = {
    "fp32": {State.PARAM: 4, State.GRAD: 4, State.OPTIM: 8},
    "bf16": {State.PARAM: 2, State.GRAD: 2, State.OPTIM: 12},
}
SETTINGS = {
    "fp32": {},
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
}


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank."""

    states: Mapping[State, int]  # as the engine reports them
    live: int  # storages of live tensors


def main(arguments: Sequence[str] | None = None) -> dict[int, list[Measured]]:
    """Measures, prints and draws; returns what every rank measured, by stage."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="gloo ranks (default 4)")
    parser.add_argument("--size", choices=SIZES, default="25m")
    parser.add_argument("--precision", choices=BYTES, default="fp32")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    args = parser.parse_args(arguments)
    found = {
        stage: run_ranks(args.ranks, measure, stage, args.size, args.precision, timeout_s=300)
        for stage in STAGES
    }
    formula = formulas(args.size, args.precision, args.ranks)
    title = (
        f"GPT of {numel_of(args.size) / 1e6:.1f} M parameters, Adam, {args.precision}, "
        f"{args.ranks} ranks"
    )
    print(f"{title}; torch {torch.__version__}\n{table(found, formula)}")
    draw(found, formula, args, title)
    print(args.picture)
    return found


def numel_of(size: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(SIZES[size]).parameters())


def formulas(size: str, precision: str, num_ranks: int) -> dict[int, dict[State, float]]:
    """Bytes by stage and state."""
    return {
        number: {
            state: numel_of(size) * nbytes / (num_ranks if stage.has_shard(state) else 1)
            for state, nbytes in BYTES[precision].items()
        }
        for number, stage in STAGES.items()
    }


def in_words(stage: int, precision: str) -> str:
    """Bytes per parameter, such as "4 + 12/N"."""
    shards = STAGES[stage].shards
    replicated = sum(n for state, n in BYTES[precision].items() if state not in shards)
    shared = sum(n for state, n in BYTES[precision].items() if state in shards)
    return " + ".join(
        part for part in (f"{replicated}" * bool(replicated), f"{shared}/N" * bool(shared)) if part
    )


def measure(rank: int, world_size: int, stage: int, size: str, precision: str) -> Measured:
    """Trains three steps on two tokens, whose activations are nothing beside the parameters."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(SIZES[size].vocab_size, (1, 2), generator=generator)
    gc.collect()
    gc.freeze()  # what exists is not walked any more
    before = live_storage_bytes()
    model = GPT(SIZES[size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config = lightning_zero.ZeroConfig(stage=stage, **SETTINGS[precision])
    engine = lightning_zero.Engine(model, optimizers=[optimizer], config=config)
    for _ in range(3):
        engine.zero_grad()
        engine.backward(F.cross_entropy(model(ids)[0, :-1].float(), ids[0, 1:]))
        engine.step()
    report = engine.memory_report()
    gc.collect()
    states = {state: report.state_bytes(state) for state in State}
    return Measured(states, live_storage_bytes() - before)


def table(found: Mapping[int, Sequence[Measured]], formula: Mapping[int, Any]) -> str:
    """MiB of every rank."""
    columns = [state.value for state in State] + ["reported", "measured", "formula", "/ formula"]
    lines = [f"{'MiB':<18}" + "".join(f"{name:>12}" for name in columns)]
    for stage, ranks in found.items():
        expected = sum(formula[stage].values())
        for rank, one in enumerate(ranks):
            values = [*one.states.values(), sum(one.states.values()), one.live, expected]
            cells = [f"{value / 2**20:>12.2f}" for value in values]
            cells.append(f"{one.live / expected:>12.4f}")
            lines.append(f"{f'stage {stage}, rank {rank}':<18}" + "".join(cells))
    return "\n".join(lines)


def draw(
    found: Mapping[int, Sequence[Measured]],
    formula: Mapping[int, Mapping[State, float]],
    args: argparse.Namespace,
    title: str,
) -> None:
    """A thin bar for each rank, and around those of a stage the formula's outline."""
    unit, size = byte_unit(max(one.live for one in found[0]))
    with blank_figure(args.picture, (9.0, 4.2), dpi=115) as figure:
        axes = figure.add_axes((0.115, 0.17, 0.86, 0.7))
        for place, (stage, ranks) in enumerate(found.items()):
            for rank, one in enumerate(ranks):
                _bar(axes, place - 0.38 + 0.76 * (rank + 0.5) / len(ranks), ranks, one, size)
            _outline(axes, place, formula[stage], size)
            mean = sum(one.live for one in ranks) / len(ranks)
            each = mean / numel_of(args.size)
            text = f"{mean / size:.0f} {unit}: {each:.2f} bytes per parameter"
            end = (sum(formula[stage].values()) / size, place)
            axes.annotate(
                text, end, (6, 0), textcoords="offset points", va="center", fontsize=9.5, color=INK
            )
        labels = [
            f"stage {stage}\n{in_words(stage, args.precision)}" if stage else "data parallel\n16"
            for stage in found
        ]
        axes.set_yticks(range(len(found)), labels)
        axes.set_ylim(len(found) - 0.45, -0.55)
        axes.set_xlim(0, sum(formula[0].values()) / size * 1.52)
        axes.set_xlabel(unit, loc="right", labelpad=-2)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
        _legend(axes)
        heading = f"Memory of each rank, measured: {title}"
        figure.text(0.013, 0.965, heading, va="top", fontsize=11.5, weight="bold")


def _bar(axes: Any, y: float, ranks: Sequence[Measured], one: Measured, size: int) -> None:
    left = 0.0
    for state, nbytes in one.states.items():
        height = 0.62 / len(ranks)
        axes.barh(y, nbytes / size, height, left, color=STATE_COLOURS[state], zorder=2)
        left += nbytes / size


def _outline(axes: Any, place: int, formula: Mapping[State, float], size: int) -> None:
    from matplotlib.patches import Rectangle

    left = 0.0
    for nbytes in formula.values():
        axes.add_patch(Rectangle((left, place - 0.41), nbytes / size, 0.82, **OUTLINE, zorder=3))
        left += nbytes / size


def _legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=STATE_COLOURS[state], label=state.value) for state in State]
    handles.append(Patch(**OUTLINE, label="the formula, in bytes per parameter"))
    where = {"loc": "upper left", "bbox_to_anchor": (-0.01, -0.11)}
    axes.legend(handles=handles, ncols=4, frameon=False, fontsize=9.5, **where)


if __name__ == "__main__":
    main()
