"""Private names of torch and Lightning that the package uses: all are listed here, and exist.

Names in strings count, too: of `getattr`, of operators, of functions in a traceback. A name that is
gone fails with what the package needs it for. A new use fails until it is listed.
"""

import ast
import importlib
import re
from collections import defaultdict
from types import SimpleNamespace

import lightning
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.repository.test_layers import MODULES, package_of, syntax_of

# ------------------------------------------------------------------ imported names, by their module

TREES = "containers of tensors in inputs, outputs and states"
DISPATCH = "what an optimizer does to its tensors, and the planner's counts"
SHARDED = "what may be in a sharded checkpoint"
IMPORTED = {
    "torch._dynamo": {"OptimizedModule": "names of parameters of a compiled module"},
    "torch._dynamo.callback": {"callback_handler": "gradients that torch.compile cannot describe"},
    "torch.distributed.checkpoint._nested_dict": {
        "unflatten_state_dict": "containers in sharded checkpoints"
    },
    "torch.distributed.checkpoint.filesystem": {
        "_StorageInfo": "places of tensors in sharded checkpoints"
    },
    "torch.distributed.checkpoint.metadata": {"_MEM_FORMAT_ENCODING": SHARDED},
    "torch.serialization": {"_get_layout": SHARDED},
    "torch.testing._internal.distributed.fake_pg": {"FakeStore": "the planner's process group"},
    "torch.utils._python_dispatch": {
        "TorchDispatchMode": DISPATCH,
        "is_traceable_wrapper_subclass": "4-bit and low-bit tensors",
    },
    "torch.utils._pytree": dict.fromkeys(
        ("tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"), TREES
    ),
    "lightning.fabric.strategies.strategy": {
        "_BackwardSyncControl": "no_backward_sync of Fabric",
        "_apply_filter": "filter= of Fabric's save",
        "_validate_keys_for_strict_loading": "strict= of Fabric's load",
    },
    "lightning.fabric.strategies.launchers.subprocess_script": {
        "_basic_subprocess_cmd": "the command line of the other ranks of a node",
        "_hydra_subprocess_cmd": "the command line of the other ranks of a node in a Hydra job",
    },
    "lightning.fabric.utilities.cloud_io": {"_is_local_file_protocol": "remote checkpoints"},
    "lightning.fabric.utilities.distributed": {
        "_get_default_process_group_backend_for_device": "the backend of the process group",
        "_init_dist_connection": "the process group",
        "_set_num_threads_if_needed": "threads of each rank",
        "_sync_ddp_if_available": "metrics with sync_dist=True",
    },
    "lightning.fabric.utilities.rank_zero": {"_get_rank": "loggers before there are ranks"},
    "lightning.fabric.utilities.types": {
        "_PATH": "types of paths",
        "_Stateful": "objects in a checkpoint of Fabric",
    },
    "lightning.pytorch.callbacks.throughput_monitor": {
        "_plugin_to_compute_dtype": "the peak TFLOPS of a precision"
    },
    "lightning.pytorch.core.optimizer": {
        "_MockOptimizer": "modules without an optimizer",
    },
    "lightning.pytorch.core.saving": {"_load_state": "load_from_checkpoint"},
    "lightning.pytorch.plugins.io.wrapper": {"_WrappingCheckpointIO": "AsyncCheckpointIO"},
    "lightning.pytorch.strategies.launchers": {
        "_MultiProcessingLauncher": "start_method spawn, fork and forkserver",
        "_SubprocessScriptLauncher": "the start of the other ranks of a node",
    },
    "lightning.pytorch.trainer.connectors.signal_connector": {
        "_SignalConnector": "signals that save and requeue a SLURM job"
    },
    "lightning.pytorch.utilities.data": {"_extract_batch_size": "samples per second"},
    "lightning.pytorch.utilities.exceptions": {
        "_TunerExitException": "ranks that the learning-rate finder ends"
    },
}

# ---------------------------------------------------------- attributes, by what has them

HOOKS = "hooks that users have registered"
MODULE = "parameters and buffers that are replaced one by one"
STATE_DICT = "state dicts without full parameters"
POINTER = "memory that is freed while tensors still refer to it"
GROUPS = "groups whose waits end at a failure"
STORE = "the address of rank 0, for the log of failures"
OPERATORS = "which operators are elementwise, change shapes only, or read values"
ATTRIBUTES = {
    "a module": {
        **dict.fromkeys(("_parameters", "_buffers", "_modules", "_apply"), MODULE),
        **dict.fromkeys(("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"), HOOKS),
        **dict.fromkeys(("_forward_hooks", "_forward_hooks_with_kwargs"), HOOKS),
        **dict.fromkeys(("_forward_hooks_always_called", "_state_dict_hooks"), HOOKS),
        "_load_state_dict_post_hooks": HOOKS,
        **dict.fromkeys(("_save_to_state_dict", "_load_from_state_dict"), STATE_DICT),
    },
    "a tensor": {
        "_backward_hooks": HOOKS,
        "_post_accumulate_grad_hooks": HOOKS,
        "_base": "views of parameters",
        "_version": "writes to parameters",
        "_make_subclass": "parameters that are sharded",
        "_make_wrapper_subclass": "sharded tensors",
    },
    "a storage": {
        "_cdata": "tensors that share memory",
        "_checkpoint_offset": "the place of a tensor in a file of torch.save",
    },
    "torch._C": {
        "_functorch": "torch.func transforms, which are refused",
        "_storage_Use_Count": "whether a user holds memory",
        **dict.fromkeys(("_distributed_c10d", "_distributed_c10d.FakeWork"), "the planner"),
        "_construct_storage_from_data_pointer": POINTER,
        "_set_throw_on_mutable_data_ptr": POINTER,
    },
    "torch": {
        "_C": "the names of torch._C",
        "_foreach_copy_": "gradients of a bucket into one flat tensor",
        "_foreach_mul_": "clipping by norm",
    },
    "torch.autograd": {"_unsafe_preserve_version_counter": "all-gathers into saved tensors"},
    "torch.nn.modules": {
        "batchnorm._NormBase": "modules that keep float32",
        "conv._ConvNd": "modules that keep float32",
        "MultiheadAttention._reset_parameters": "modules on the meta device",
    },
    "torch.ops.aten": {
        "_to_copy": "casts of checkpoint shards",
        "_amp_foreach_non_finite_check_and_unscale_": "GradScaler",
        **dict.fromkeys(("_foreach_copy_", "_foreach_norm", "_local_scalar_dense"), OPERATORS),
        **dict.fromkeys(("_reshape_alias", "_unsafe_view"), OPERATORS),
    },
    "an operator": {"_schema": DISPATCH},
    "an optimizer": {
        **dict.fromkeys(("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"), HOOKS),
        "_optimizer_load_state_dict_pre_hooks": HOOKS,
        "_optimizer_load_state_dict_post_hooks": HOOKS,
        **dict.fromkeys(("_opt_called", "step._wrapped_by_lr_sched"), "schedulers"),
    },
    "torch.distributed": {
        "distributed_c10d._get_default_store": STORE,
        "distributed_c10d._world": GROUPS,
        "distributed_c10d._abort_process_group": GROUPS,
        "ProcessGroup._device_types": GROUPS,
        "ProcessGroup._get_backend": GROUPS,
        "ProcessGroup._get_sequence_number_for_group": "deadlocks in collectives of the user",
    },
    "a Trainer": {
        "_signal_connector": "SIGTERM and requeueing",
        "_signal_connector._register_signal": "SIGTERM and requeueing",
        "_signal_connector._sigterm_notifier_fn": "SIGTERM on any rank",
        "_checkpoint_connector": "resuming",
        "_checkpoint_connector._parse_ckpt_path": 'ckpt_path="newest"',
        "_checkpoint_connector._get_lightning_module_state_dict": STATE_DICT,
        "_active_loop": "batches of which all ranks have equally many",
        "_results": "metrics of a loop that another rank has left",
        "fit_loop.epoch_loop._batches_that_stepped": "steps in logged metrics",
        "fit_loop.epoch_loop._is_training_done": "the place in training of a requeued job",
        "fit_loop.epoch_loop._should_accumulate": "the place in training of a requeued job",
        "fit_loop.epoch_loop._broadcast_sigterm_tensor": "SIGTERM on any rank",
        "validate_loop._store_dataloader_outputs": "evaluation loops of different lengths",
    },
    "a LightningModule": {"_trainer": "modules that are used after fit"},
    "a strategy": {
        **dict.fromkeys(("_optimizers", "_lightning_optimizers"), "optimizers of the Trainer"),
        "_layer_sync": "sync_batchnorm=True",
        "_configure_launcher": "the start of ranks",
        "_reset_optimizers_and_schedulers": "teardown",
    },
    "a strategy of Fabric": {"_convert_stateful_objects_in_state": "objects in a checkpoint"},
    "a precision plugin": {
        "_after_closure": "clipping after the last micro-batch",
        "_desired_input_dtype": "true half precision",
    },
    "callbacks": {
        "WeightAveraging._swap_models": "averaged weights",
        "WeightAveraging._copy_average_to_current": "averaged weights",
        "StochasticWeightAveraging.update_parameters": "averaged weights",
        "ModelCheckpoint._ModelCheckpoint__resolve_ckpt_dir": 'ckpt_path="newest"',
    },
    "a ModelCheckpoint": {"_last_global_step_saved": "the last step that is saved at an error"},
    "a logger's file": {"_fs": "metrics.csv of a requeued job"},
}
# Set by Lightning where these tests have none.
NOT_HERE = {
    "_average_model": "WeightAveraging, in a fit",
    "_avg_fn": "SWA, in a fit",
}
# The package looks whether these exist, and does without where they do not.
OPTIONAL = {
    "_swap_data_ptr_",  # UntypedStorage of torch 2.13, not 2.11: freed memory reads as NaN
    "_set_storage_data_ptr_access_error_msg",  # torch._C of CUDA builds: reading it raises
    "_clear_storage_data_ptr_access_error_msg",
    "_foreach_powsum",  # operators that not all versions have
    "_scaled_mm",
}
# Of Python, of fsspec, and of named tuples.
PYTHON = {"_current_frames", "_getframe", "_replace", "_make", "_fields", "_parent", "_exit"}
PYTHON |= {"_Unpickler"}
# Attributes that some models of transformers have, and a key of Hydra.
OF_MODELS = {"_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_get_dtype_plan"}
OF_MODELS |= {"_init_weights"}
HYDRA = {"_target_"}
# Parts of names of settings, metrics, files and functions; attributes that this package sets.
PARTS = {"_bytes", "_bytes_per_node", "_exposed_s", "_extra_state", "_foreach_", "_fused_"}
PARTS |= {"_gb_per_s", "_gib", "_list", "_nbytes", "_notebook", "_object", "_object_list"}
PARTS |= {"_optimizer_", "_overlapped_s", "_rank_", "_s", "_is_flat_buffer"}
OWN = "_zero_"


def _scheduled(module):
    """An optimizer that a scheduler watches, after a step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.step()
    return optimizer


def _owner(name):
    """An object that has the attributes of `ATTRIBUTES[name]`."""
    module = nn.Linear(1, 1)
    makers = {
        "a module": lambda: module,
        "a tensor": lambda: module.weight,
        "a storage": lambda: module.weight.untyped_storage(),
        "torch._C": lambda: torch._C,
        "torch": lambda: torch,
        "torch.autograd": lambda: torch.autograd,
        "torch.nn.modules": lambda: nn.modules,
        "torch.ops.aten": lambda: torch.ops.aten,
        "an operator": lambda: torch.ops.aten.add.Tensor,
        "an optimizer": lambda: _scheduled(module),
        "torch.distributed": lambda: SimpleNamespace(
            distributed_c10d=dist.distributed_c10d, ProcessGroup=dist.ProcessGroup
        ),
        "a Trainer": lambda: pl.Trainer(accelerator="cpu", devices=1, logger=False),
        "a LightningModule": pl.LightningModule,
        "a strategy": pl.strategies.DDPStrategy,
        "a strategy of Fabric": lightning.fabric.strategies.DDPStrategy,
        "a precision plugin": lambda: SimpleNamespace(
            _after_closure=pl.plugins.precision.Precision._after_closure,
            _desired_input_dtype=pl.plugins.precision.HalfPrecision(
                "bf16-true"
            )._desired_input_dtype,
        ),
        "callbacks": lambda: pl.callbacks,
        "a ModelCheckpoint": pl.callbacks.ModelCheckpoint,
        "a logger's file": lambda: lightning.fabric.loggers.csv_logs._ExperimentWriter("."),
    }
    return makers[name]()


def _explain(name, use):
    package = "torch" if name.startswith("torch") or "lightning" not in name else "Lightning"
    versions = f"torch {torch.__version__}, Lightning {lightning.__version__}"
    return f"{name} of {package} is gone in {versions}: the package needs it for {use}"


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in IMPORTED.items() for name in names]
)
def test_a_private_import_exists(module, name):
    use = IMPORTED[module][name]
    try:
        imported = importlib.import_module(module)
    except ImportError:
        pytest.fail(_explain(f"{module}.{name}", use))
    assert hasattr(imported, name), _explain(f"{module}.{name}", use)


@pytest.mark.parametrize("owner", ATTRIBUTES)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_private_attributes_exist(owner, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    has_them = _owner(owner)
    gone = []
    for path, use in ATTRIBUTES[owner].items():
        value = has_them
        for part in path.split("."):
            if not hasattr(value, part):
                gone.append(_explain(f"{path} of {owner}", use))
                break
            value = getattr(value, part)
    assert not gone, "\n".join(gone)


def _defined():
    """Names that the package itself defines or sets."""
    for module in MODULES:
        if package_of(module) == "_lightning":
            continue  # its names are Lightning's
        for node in ast.walk(syntax_of(module)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.attr if isinstance(node, ast.Attribute) else node.id


def _is_private(name):
    return name.startswith("_") and not name.startswith("__")


def _is_private_text(value):
    is_name = isinstance(value, str) and re.fullmatch(r"_[A-Za-z]\w*", value) is not None
    return is_name and not value.startswith(OWN)


def test_every_private_name_in_use_is_listed():
    listed = {path.rpartition(".")[2] for names in ATTRIBUTES.values() for path in names}
    listed |= PYTHON | OPTIONAL | NOT_HERE.keys() | set(_defined())
    listed |= {name for names in IMPORTED.values() for name in names}
    listed |= OF_MODELS | HYDRA | PARTS
    found = defaultdict(set)
    for module in MODULES:
        for node in ast.walk(syntax_of(module)):
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                found[node.attr].add(module)
            elif isinstance(node, ast.Constant) and _is_private_text(node.value):
                found[node.value].add(module)
            elif isinstance(node, ast.ImportFrom):
                source = node.module or ""
                if source.split(".")[0] not in {"torch", "lightning", "lightning_utilities"}:
                    continue
                is_private = any(map(_is_private, source.split(".")))
                for alias in node.names:
                    if is_private or _is_private(alias.name):
                        known = alias.name in IMPORTED.get(source, {})
                        found[f"{source}.{alias.name}"] |= set() if known else {module}
    new = {name: sorted(modules) for name, modules in found.items() if modules}
    new = {name: modules for name, modules in new.items() if name not in listed}
    assert not new, f"private names of torch or Lightning that are not listed here: {new}"
