"""What `lightning-zero plan` plans: a model built without memory, a step of it, and settings."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_zero.layout.config import ZeroConfig
from lightning_zero.planner import SHAPES, Decoder, DecoderShape, shape_of_hugging_face
from lightning_zero.strategy.schema import register
from lightning_zero.strategy.settings import auto_base

__all__ = [
    "PRECISIONS",
    "Precision",
    "Source",
    "of_arguments",
    "strategy_settings",
    "trainer_settings",
]


def strategy_settings(config: DictConfig) -> ZeroConfig:
    """Those of `trainer.strategy`, of whichever stage they are.

    Raises:
        ValueError: Settings that no stage takes together.
    """
    strategy = OmegaConf.select(config, "trainer.strategy")
    given: dict[str, Any] = {}
    for name in inspect.signature(ZeroConfig).parameters:
        if name != "stage" and isinstance(strategy, DictConfig) and name in strategy:
            value = strategy[name]
            given[name] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return auto_base(given)


def trainer_settings(config: DictConfig) -> dict[str, Any]:
    """`ranks`, `ranks_per_node`, `precision` and `micro_batches`; None where it is not said."""
    devices = OmegaConf.select(config, "trainer.devices", throw_on_resolution_failure=False)
    nodes = OmegaConf.select(config, "trainer.num_nodes") or 1
    return {
        "ranks": devices * nodes if isinstance(devices, int) else None,
        "ranks_per_node": devices if isinstance(devices, int) else None,
        "precision": OmegaConf.select(config, "trainer.precision"),
        "micro_batches": OmegaConf.select(config, "trainer.accumulate_grad_batches"),
    }


Step = Callable[[nn.Module], Tensor]
_CONF = Path(__file__).parents[1] / "conf"


@dataclass(frozen=True)
class Precision:
    """What a Trainer's `precision` means.

    Attributes:
        module: Dtype of the module itself; None: as it is built.
        param: `ZeroConfig.param_dtype`.
        autocast: Dtype of autocast.
    """

    module: torch.dtype | None = None
    param: torch.dtype | None = None
    autocast: torch.dtype | None = None


PRECISIONS = {
    "32-true": Precision(),
    "bf16-mixed": Precision(param=torch.bfloat16, autocast=torch.bfloat16),
    "16-mixed": Precision(param=torch.float16, autocast=torch.float16),
    "bf16-true": Precision(module=torch.bfloat16),
    "16-true": Precision(module=torch.float16),
    "64-true": Precision(module=torch.float64),
}


@dataclass(frozen=True)
class Source:
    """What is to be planned.

    Attributes:
        title: For people.
        module: On the meta device.
        step: Computes a loss; None: nothing is known about inputs.
        config: Sizes, and where they say so the folder and buffers of files.
        settings: What a Hydra configuration says of `ranks`, `precision` and `micro_batches`.
    """

    title: str
    module: nn.Module
    step: Step | None
    config: ZeroConfig = field(default_factory=ZeroConfig)
    settings: Mapping[str, Any] = field(default_factory=dict)


def of_arguments(args: argparse.Namespace) -> Source:
    """Builds what the command line names.

    Raises:
        ValueError: There is no such preset, module, class or setting, or it cannot be built.
    """
    if args.overrides and not args.config_name:
        raise ValueError(
            f"{args.overrides[0]!r} is an override of a Hydra configuration, and there is none; "
            "use --config-name, or --arg for arguments of --module."
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
    """As a `config.json` of Hugging Face says, or that of a folder."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"there is no model {str(path)!r}; there are {', '.join(SHAPES)}, and any config.json "
            "of Hugging Face, or folder that holds one."
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
        raise ValueError(f"expected a module and a class as in my.code:Model, got {path!r}.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as for `python -m`
    try:
        found = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"module {module_name} cannot be imported ({error}); name it as Python would, from "
            "this folder or PYTHONPATH."
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
            f"module {module_name} has no class {class_name}; it has {', '.join(near) or 'none'}."
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
    """On the meta device, where nothing takes memory."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = make()
            if isinstance(module, nn.Module) and not any(True for _ in module.parameters()):
                getattr(module, "configure_model", lambda: None)()
    except Exception as error:
        text = " ".join(str(error).split())
        if text.startswith("Error locating target"):
            reason = " ".join(str(error.__cause__ or text).split())
            raise ValueError(
                f"{title} cannot be imported ({reason[:300]}); put the folder of its code on "
                "PYTHONPATH."
            ) from error
        raise ValueError(
            f"{title} cannot be built on the meta device, where tensors have no values "
            f"({type(error).__name__}: {text[:300]}); give its arguments with --arg "
            "or as overrides, and let weights be loaded in setup()."
        ) from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"{title} is a {type(module).__name__}, expected a torch.nn.Module.")
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
            f"expected an input as 8x3x224x224 or 8x1024:int64, got {text!r}; one --input for each "
            "argument of forward."
        )
    return tuple(map(int, size.split("x"))), dtype


def _on_example(module: nn.Module) -> Step | None:
    """Lightning's own attribute for this, where a module has it."""
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
    """Of what a model gives, one number on which every output depends."""
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not leaves:
        raise ValueError("the model's outputs do not depend on any trained parameter.")
    return torch.stack([leaf.float().sum() for leaf in leaves]).sum()


# -------------------------------------------------------------------- Hydra


def _hydra(args: argparse.Namespace) -> Source:
    folder = Path(args.config_dir).resolve() if args.config_dir else _CONF.resolve()
    if not folder.is_dir():
        raise ValueError(f"--config-dir {folder} is no folder.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    register()  # what the files of conf refer to
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(folder)):
            config = compose(args.config_name, overrides=args.overrides)
        for part in ("model", "trainer"):
            if part not in config:
                raise ValueError(f"{args.config_name} in {folder} has no `{part}`.")
        module = _build("model", lambda: instantiate(config.model))
        settings, base = trainer_settings(config), strategy_settings(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{error}; {error.__cause__ or ''}".strip("; ")) from error
    batch = args.batch or OmegaConf.select(config, "data.batch_size")
    context = args.context or OmegaConf.select(config, "data.context")
    title = str(OmegaConf.select(config, "model._target_")).rpartition(".")[2]
    step = _on_shapes(args.input) if args.input else _on_tokens(module, batch, context)
    if step is not None and not args.input:
        title += f", batch {batch} x {context} tokens"
    return Source(title, module, step, base, settings)


def _on_tokens(module: nn.Module, batch: int | None, context: int | None) -> Step | None:
    """The training step of a language model, as `examples/language_model.py` has it."""
    if not batch or not context or not hasattr(module, "training_step"):
        return _on_example(module)

    def step(model: Any) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no Trainer to log to
            output = model.training_step(torch.zeros(batch, context + 1, dtype=torch.uint8), 0)
        loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
        return loss

    return step
