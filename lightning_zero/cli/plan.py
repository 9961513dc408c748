"""`lightning-zero plan`: memory and traffic of every stage and offload, before a job is submitted.

Builds the model on the meta device, and estimates every choice; `plan_result` prints the result.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

import lightning_zero.conf  # registers the schemas that its files refer to
from lightning_zero.cli.options import PRECISIONS
from lightning_zero.cli.plan_result import Row, as_dict, as_text, best_of, check_plot, draw, heading
from lightning_zero.core.recompute import find_checkpointed, outermost
from lightning_zero.layout.config import ZeroConfig
from lightning_zero.layout.names import parameters_by_name
from lightning_zero.layout.offload import Tier
from lightning_zero.layout.units import find_blocks
from lightning_zero.optim.probe import find_full_optimizers
from lightning_zero.optim.state_sizes import (
    OptimizerStates,
    data_parallel_bytes,
    full_checkpoint_bytes,
)
from lightning_zero.planner import (
    SHAPES,
    Decoder,
    DecoderShape,
    EngineRuns,
    Estimate,
    Machine,
    Rates,
    all_choices,
    auto_base,
    estimate,
    make_optimizers,
    shape_of_hugging_face,
    with_recompute,
)
from lightning_zero.tensors.ties import check_memory

if TYPE_CHECKING:
    from lightning_zero.strategy.float8 import Float8Precision

__all__ = ["Source", "source_from_arguments", "run"]

_Item = TypeVar("_Item")
_SHORT_PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
# Attribute of the planner's `Rates` by argument; a GB is 10^9 bytes.
_RATES = {
    "link_gb_per_s": "link",
    "cpu_link_gb_per_s": "cpu_link",
    "io_gb_per_s": "nvme",
    "memory_gb_per_s": "memory",
}
_CONF = Path(__file__).parents[1] / "conf"


def run(args: argparse.Namespace) -> int:
    """Plans the job of `args` and prints the result; returns 1 if nothing fits."""
    if args.plot is not None:
        check_plot(args.plot)
    source = source_from_arguments(args)
    check_memory(source.module)
    name = args.precision or source.settings.get("precision") or "bf16-mixed"
    if name not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {name!r}.")
    plugin = _float8_plugin(source) if name == "float8" else None
    source, autocast = _in_precision(source, name, plugin)
    config = source.config
    machine = _machine(args, source)
    num_micro_batches = int(args.micro_batches or source.settings.get("micro_batches") or 1)
    blocks = outermost(find_blocks(source.module))
    named = parameters_by_name(source.module)
    optimizers = make_optimizers(args.optimizer, named, blocks)
    states = OptimizerStates(optimizers)
    for parameter in named.values():
        states.of(parameter, torch.float32)  # raises if a step of the optimizer needs more
    runs = partial(
        EngineRuns,
        source.module,
        optimizers,
        num_micro_batches=num_micro_batches,
        autocast=autocast,
        full_optimizers=find_full_optimizers(optimizers, config),
        averages=[Tier(where) for where in args.average],
    )
    summary = {
        "model": source.title,
        "parameters": sum(parameter.numel() for parameter in named.values()),
        "precision": name,
        "plugin": None if plugin is None else repr(plugin),
        "optimizer": args.optimizer if len(optimizers) == 1 else "muon and adamw",
        "ranks": machine.num_ranks,
        "ranks_per_node": machine.ranks_per_node,
        "micro_batches": num_micro_batches,
        "on_cpu": not machine.has_device_memory,
        "link_is_assumed": machine.rates.link == Rates().link,
        "data_parallel_bytes": data_parallel_bytes(named, optimizers),
        "full_checkpoint_bytes": full_checkpoint_bytes(named, optimizers),
    }
    if not args.json:
        print(heading(summary, machine), flush=True)
    rows, note = _rows(runs, source.step, machine, config)
    best = best_of(rows)
    if args.json:
        print(json.dumps({**summary, "choices": [as_dict(row) for row in rows], "best": best}))
    else:
        print(as_text(summary, rows, machine, best, note, shows_all=args.all))
    if args.plot is not None:
        title = f"{source.title}, {name}, {machine.num_ranks} ranks"
        draw(rows, best["choice"] if best else None, machine, title, args.plot)
        print(f"plot: {args.plot}", file=sys.stderr)
    return 0 if best else 1


def _float8_plugin(source: Source) -> Float8Precision:
    """The plugin of a configuration; without one, the default.

    Raises:
        ModuleNotFoundError: torchao is not installed.
        ValueError: The plugin cannot be built.
    """
    # First, since Hydra's error without torchao does not explain what to install.
    plugin = lightning_zero.Float8Precision()
    if given := source.settings.get("float8"):
        try:
            plugin = instantiate(given)
        except HydraException as error:
            raise ValueError(f"trainer.plugins: {error.__cause__ or error}") from error
    return plugin


def _in_precision(
    source: Source, name: str, plugin: Float8Precision | None
) -> tuple[Source, torch.dtype | None]:
    """The module and config of `source` in a precision of a Trainer, and its autocast dtype."""
    dtype = getattr(torch, PRECISIONS[name]) if PRECISIONS[name] else None
    if plugin is not None:
        source = replace(source, module=plugin.convert_module(source.module))
    elif not name.endswith("-mixed"):
        return (source if dtype is None else replace(source, module=source.module.to(dtype))), None
    config = source.config
    if config.param_dtype is None:
        config = config.replace(param_dtype=dtype)
    return replace(source, config=config.under_autocast()), dtype


def _machine(args: argparse.Namespace, source: Source) -> Machine:
    num_ranks = args.ranks or source.settings.get("ranks")
    if not num_ranks:
        raise ValueError("expected the number of ranks; use --ranks 8, for example.")
    per_node = args.ranks_per_node
    if not per_node and not args.ranks:
        per_node = source.settings.get("ranks_per_node")
    per_node = per_node or min(num_ranks, 8)
    if num_ranks % per_node:
        raise ValueError(
            f"--ranks-per-node must divide {num_ranks} ranks, got {per_node}; set --ranks-per-node."
        )
    device_bytes = args.device_memory
    if args.on_cpu and device_bytes is None and args.host_memory is not None:
        device_bytes = args.host_memory // per_node
    # The command line overrides the file, the file overrides the defaults.
    rates = {name: rate for name in _RATES if (rate := getattr(args, name)) is not None}
    return Machine(
        num_ranks,
        per_node,
        device_bytes,
        args.host_memory,
        args.disk,
        has_device_memory=not args.on_cpu,
        rates=replace(Rates(), **{_RATES[name]: rate * 1e9 for name, rate in rates.items()}),
    )


def _rows(
    runs: Callable[[Step | None], EngineRuns],
    step: Step | None,
    machine: Machine,
    config: ZeroConfig,
) -> tuple[list[Row], str]:
    """Estimates of all choices, and a note on what is not counted.

    Args:
        runs: Makes the runs of the engine for a step.
        step: Function of the model that computes a loss; None: its inputs are unknown.
        machine: Hardware of the job.
        config: Settings for any stage and offload.
    """
    choices = all_choices(config)
    if step is not None:
        counted = runs(step)
        try:
            plain = [estimate(choice, counted, machine) for choice in _progress(choices, "")]
        except ValueError as error:
            note = f"activations are not counted: {error}"
        else:
            recomputed, note = _with_recompute(plain, counted)
            return list(map(Row, plain, recomputed)), note
    else:
        note = "activations are not counted: pass the shapes of the inputs with --input."
    counted = runs(None)
    return [Row(estimate(c, counted, machine), None) for c in _progress(choices, "")], note


def _progress(items: Sequence[_Item], how: str) -> Iterator[_Item]:
    """Yields the items, and counts them on stderr if it is a terminal."""
    is_shown = sys.stderr.isatty()
    try:
        for number, item in enumerate(items, start=1):
            if is_shown:
                text = f"\rchoice {number} of {len(items)}{how}"
                print(text, end="", file=sys.stderr, flush=True)
            yield item
    finally:
        if is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)  # clears the line


def _with_recompute(
    plain: Sequence[Estimate], runs: EngineRuns
) -> tuple[Sequence[Estimate | None], str]:
    """Estimates with activation checkpointing of the repeated blocks, and a note.

    None: modules are under activation checkpointing already, or there are no such blocks.
    """
    nothing = [None] * len(plain)
    is_set = any(find_checkpointed(runs.module, plain[0].choice.config.checkpointed_modules))
    if is_set or not find_blocks(runs.module):
        return nothing, ""
    try:
        found = [with_recompute(one, runs) for one in _progress(plain, " with recompute")]
        return found, ""
    except ValueError as error:
        return nothing, f"activation checkpointing is not counted: {error}"


# -------------------------------------------------------------------- model and step

Step = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Source:
    """Model, step and settings of a job.

    Attributes:
        title: Description of the model for the output.
        module: Model on the meta device.
        step: Function of the model that computes a loss; None: its inputs are unknown.
        config: Settings of the strategy, without stage and offload.
        settings: `ranks`, `ranks_per_node`, `precision`, `float8` (the plugin) and `micro_batches`
            of a Hydra configuration; None: not set there.
    """

    title: str
    module: nn.Module
    step: Step | None
    config: ZeroConfig = field(default_factory=ZeroConfig)
    settings: Mapping[str, Any] = field(default_factory=dict)


def source_from_arguments(args: argparse.Namespace) -> Source:
    """Builds the model of the command line.

    Raises:
        ValueError: The preset, module, class or setting does not exist, or cannot be built.
    """
    if args.overrides and not args.config_name:
        raise ValueError(
            f"{args.overrides[0]!r} is an override of a Hydra configuration; use it with "
            "--config-name, or use --arg for arguments of --module."
        )
    if args.model:
        return _shape(args.model, args.batch, args.context)
    if args.module:
        return _class(args.module, args.arg, args.input)
    return _hydra(args)


def _shape(name: str, batch: int | None, context: int | None) -> Source:
    context = context or 1024
    shape = SHAPES.get(name) or _shape_in(Path(name))
    if shape.context:  # learned positions
        shape = replace(shape, context=context)
    with torch.device("meta"):
        module = Decoder(shape)
    size = (batch or 1, context)

    def step(model: nn.Module) -> Tensor:
        ids = torch.zeros(size, dtype=torch.long)
        logits = model(ids)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())

    return Source(f"{name}, batch {size[0]} x {size[1]} tokens", module, step)


def _shape_in(path: Path) -> DecoderShape:
    """Shape of a Hugging Face `config.json`, or of a directory that contains one."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"the model must be one of {', '.join(SHAPES)}, a Hugging Face config.json or a "
            f"directory with one, got {str(path)!r}."
        )
    try:
        config = json.loads(file.read_text())
        if not isinstance(config, dict):
            raise ValueError(f"expected an object, got {config!r:.40}.")
        return shape_of_hugging_face(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _class(path: str, arguments: Sequence[str], inputs: Sequence[str]) -> Source:
    module_name, _, class_name = path.partition(":")
    if not class_name:
        raise ValueError(
            f"--module must be a module and a class, such as my.code:Model, got {path!r}."
        )
    if "" not in sys.path:
        sys.path.insert(0, "")  # as for `python -m`
    try:
        found = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"module {module_name} cannot be imported ({error}); it must be importable from this "
            "directory or PYTHONPATH."
        ) from error
    factory = getattr(found, class_name, None)
    if factory is None:
        near = [
            name
            for name, kind in vars(found).items()
            if inspect.isclass(kind) and issubclass(kind, nn.Module)
            if kind.__module__ == module_name
        ]
        raise ValueError(
            f"module {module_name} has no class {class_name}; it has: {', '.join(near) or 'none'}."
        )
    for text in arguments:
        if "=" not in text:
            raise ValueError(f"--arg must be NAME=VALUE, got {text!r}.")
    try:
        keywords: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(arguments)))
    except OmegaConfBaseException as error:
        raise ValueError(f"--arg must be NAME=VALUE: {error}") from error
    module = _build(class_name, lambda: factory(**keywords))
    step = _on_shapes(inputs) if inputs else _on_example(module)
    return Source(class_name, module, step)


def _build(title: str, make: Callable[[], Any]) -> nn.Module:
    """Builds a module on the meta device."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = make()
            if isinstance(module, nn.Module) and not any(True for _ in module.parameters()):
                getattr(module, "configure_model", lambda: None)()
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        if text.startswith("Error locating target"):
            reason = " ".join(str(error.__cause__ or text).split())
            raise ValueError(
                f"{title} cannot be imported ({reason[:300]}); add the directory of its code to "
                "PYTHONPATH."
            ) from error
        raise ValueError(
            f"{title} cannot be built on the meta device, where tensors have no values "
            f"({type(error).__name__}: {text[:300]}); pass its arguments with --arg or as "
            "overrides, and load weights in setup()."
        ) from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"expected {title} to be a torch.nn.Module, got {type(module).__name__}.")
    return module


def _on_shapes(inputs: Sequence[str]) -> Step:
    made = [_parse_input(text) for text in inputs]

    def step(model: nn.Module) -> Tensor:
        return _as_loss(model(*(torch.zeros(shape, dtype=dtype) for shape, dtype in made)))

    return step


def _parse_input(text: str) -> tuple[tuple[int, ...], torch.dtype]:
    size, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    if not isinstance(dtype, torch.dtype) or not all(part.isdigit() for part in size.split("x")):
        raise ValueError(
            f"--input must be a shape such as 8x3x224x224 or 8x1024:int64, got {text!r}; use one "
            "--input for each argument of forward."
        )
    return tuple(map(int, size.split("x"))), dtype


def _on_example(module: nn.Module) -> Step | None:
    """Step on `example_input_array` of a LightningModule; None: the module has none."""
    example = getattr(module, "example_input_array", None)
    if example is None:
        return None

    def step(model: nn.Module) -> Tensor:
        real = tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), example)
        if isinstance(real, Mapping):
            return _as_loss(model(**real))
        return _as_loss(model(*real) if isinstance(real, tuple) else model(real))

    return step


def _as_loss(output: Any) -> Tensor:
    """Sum of all outputs that require a gradient."""
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not leaves:
        raise ValueError("the model's outputs do not depend on any trained parameter.")
    return torch.stack([leaf.float().sum() for leaf in leaves]).sum()


# -------------------------------------------------------------------- Hydra


def _hydra(args: argparse.Namespace) -> Source:
    folder = Path(args.config_dir).resolve() if args.config_dir else _CONF.resolve()
    if not folder.is_dir():
        raise ValueError(f"--config-dir {folder} is not a directory.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(folder)):
            config = compose(args.config_name, overrides=args.overrides)
        for part in ("model", "trainer"):
            if part not in config:
                raise ValueError(f"{args.config_name} in {folder} has no `{part}`; it is required.")
        if args.device_memory is not None and not args.on_cpu:
            _choose_gpu(config.trainer)
        module = _build("model", lambda: instantiate(config.model))
        settings, base = _trainer_settings(config), _strategy_settings(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{error}; {error.__cause__ or ''}".strip("; ")) from error
    batch = args.batch or OmegaConf.select(config, "data.batch_size")
    context = args.context or OmegaConf.select(config, "data.context")
    title = str(OmegaConf.select(config, "model._target_")).rpartition(".")[2]
    step = _on_shapes(args.input) if args.input else _on_tokens(module, batch, context)
    if step is not None and not args.input:
        title += f", batch {batch} x {context} tokens"
    return Source(title, module, step, base, settings)


def _choose_gpu(trainer: DictConfig) -> None:
    """Makes an accelerator that this machine would choose a GPU, on which `precision` depends."""
    plain: Any = OmegaConf.to_container(trainer, resolve=False)
    if str(plain.get("accelerator")).startswith(("auto", "${zero.accelerator")):
        trainer.accelerator = "cuda"


def _on_tokens(module: nn.Module, batch: int | None, context: int | None) -> Step | None:
    """Training step of a language model with the batches of `examples/language_model.py`."""
    if not batch or not context or not hasattr(module, "training_step"):
        return _on_example(module)

    def step(model: Any) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about logging without a Trainer
            output = model.training_step(torch.zeros(batch, context + 1, dtype=torch.uint8), 0)
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
        return loss

    return step


def _strategy_settings(config: DictConfig) -> ZeroConfig:
    """Settings of `trainer.strategy`, for any stage.

    Raises:
        ValueError: No stage accepts these settings together.
    """
    strategy = OmegaConf.select(config, "trainer.strategy")
    given: dict[str, Any] = {}
    for name in inspect.signature(ZeroConfig).parameters:
        if name != "stage" and isinstance(strategy, DictConfig) and name in strategy:
            value = strategy[name]
            given[name] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return auto_base(given)


def _trainer_settings(config: DictConfig) -> dict[str, Any]:
    devices = OmegaConf.select(config, "trainer.devices", throw_on_resolution_failure=False)
    nodes = OmegaConf.select(config, "trainer.num_nodes") or 1
    return {
        "ranks": devices * nodes if isinstance(devices, int) else None,
        "ranks_per_node": devices if isinstance(devices, int) else None,
        "precision": _trainer_precision(config),
        "float8": _float8_config(config),
        "micro_batches": OmegaConf.select(config, "trainer.accumulate_grad_batches"),
    }


def _trainer_precision(config: DictConfig) -> str | None:
    """Name in `PRECISIONS` of the Trainer's precision; None if the configuration has no Trainer."""
    if OmegaConf.select(config, "trainer") is None:
        return None
    if _float8_config(config) is not None:
        return "float8"
    name = str(OmegaConf.select(config, "trainer.precision") or "32-true")  # the Trainer's default
    return _SHORT_PRECISIONS.get(name, name)


def _float8_config(config: DictConfig) -> DictConfig | None:
    """Part of the configuration that describes a `Float8Precision`, under any of its names."""
    plugins = OmegaConf.select(config, "trainer.plugins")
    for plugin in plugins if isinstance(plugins, ListConfig) else [plugins]:
        if not isinstance(plugin, DictConfig) or "_target_" not in plugin:
            continue
        target = str(plugin["_target_"])  # others may be importable only where the job will run
        is_named = target.endswith(f".{lightning_zero.Float8Precision.__name__}")
        if is_named and get_object(target) is lightning_zero.Float8Precision:
            return plugin
    return None
