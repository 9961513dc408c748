"""The offload sections of the file, and the flags that came before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_zero.deepspeed.file import Section
from lightning_zero.layout.offload import OffloadConfig
from lightning_zero.layout.stage import Stage, State

__all__ = ["offload_settings"]

_DEVICES = ("none", "cpu", "nvme")
_LEAST_BUFFERS = 2
_LEAST_BUFFER_SIZE = 2**16
_PIPELINE = "reads, steps and writes always overlap"
_WITHOUT_EFFECT = {
    "pipeline": _PIPELINE,
    "pipeline_read": _PIPELINE,
    "pipeline_write": _PIPELINE,
    "fast_init": "files are filled when the engine takes the parameters over, with all threads",
    "super_offload": "overlap_step=True of ZeroStrategy steps beside the next forward",
    "cpuadam_cores_perc": "the step takes torch's number of threads",
}
_NVME_ONLY = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu")


def offload_settings(
    zero: Section, stage: Stage, param_itemsize: int, ignored: dict[str, str]
) -> dict[str, OffloadConfig]:
    """Settings of `ZeroConfig` for what the file offloads.

    DeepSpeed's meaning holds: parameters are offloaded in stage 3 only, and below stage 3 an
    optimizer "on NVMe" is in CPU memory, as a whole.

    Args:
        zero: The zero_optimization section.
        stage: What the file asks for.
        param_itemsize: Bytes of a parameter, for `max_in_cpu`.
        ignored: Takes what has no effect, and why.

    Raises:
        ValueError: A value out of range, or a setting and its old name at once.
    """
    settings = {}
    optimizer = _section(zero, "offload_optimizer", ("cpu_offload",))
    if optimizer is not None:
        if not stage.has_shard(State.OPTIM):
            ignored[_given(zero, "offload_optimizer", ("cpu_offload",))] = (
                "it needs a stage above 0"
            )
        else:
            settings["offload_optimizer"] = _optimizer(optimizer, stage, ignored)
    old = ("cpu_offload_param", "cpu_offload_params")
    param = _section(zero, "offload_param", old)
    if param is not None:
        if not stage.has_shard(State.PARAM):
            ignored[_given(zero, "offload_param", old)] = "it needs stage 3, as in DeepSpeed"
        else:
            settings["offload_param"] = _param(param, param_itemsize, ignored)
    if zero.flag("cpu_offload_use_pin_memory") is not None and not settings:
        ignored["cpu_offload_use_pin_memory"] = "nothing is offloaded"
    return settings


def _given(zero: Section, name: str, old_names: tuple[str, ...]) -> str:
    """Under which of its names the file has the setting."""
    return next(key for key in (*old_names, name) if zero.has(key))


def _section(zero: Section, name: str, old_names: tuple[str, ...]) -> Section | None:
    """The section `name`, or what an old flag means; None where nothing is offloaded.

    Raises:
        ValueError: Both are there, or the device is unknown.
    """
    old = [key for key in old_names if zero.flag(key)]
    section = Section({}, zero.path(name))
    if zero.values.get(name) is not False:
        section = zero.section(name)
    if old and section.values:
        raise ValueError(
            f"{zero.path(old[0])} is the old name of {zero.path(name)}; keep the section only."
        )
    if old:
        section = Section({"device": "cpu"}, zero.path(name))
    if (is_pinned := zero.flag("cpu_offload_use_pin_memory")) is not None:
        section = Section({"pin_memory": is_pinned, **section.values}, section.name)
    device = section.values["device"] if section.has("device") else "none"
    if device not in _DEVICES:
        raise section.error("device", '"none", "cpu" or "nvme"')
    return None if device == "none" else section


def _optimizer(section: Section, stage: Stage, ignored: dict[str, str]) -> OffloadConfig:
    device, ratio = section.values["device"], section.number("ratio")
    if ratio is not None and ratio > 1:
        raise section.error("ratio", "a number from 0 to 1")
    is_stage_3 = stage.has_shard(State.PARAM)
    if ratio is not None and not is_stage_3:
        ignored["offload_optimizer.ratio"] = "it needs stage 3, as in DeepSpeed; all is offloaded"
        ratio = None
    if device == "nvme" and not is_stage_3:
        ignored["offload_optimizer.nvme_path"] = (
            "below stage 3 DeepSpeed keeps the optimizer in CPU memory; ZeroStrategy's "
            "offload_optimizer='nvme' would not"
        )
        device = "cpu"
    common = _common(section, "offload_optimizer", device, ignored)
    if ratio is not None:
        common["ratio"] = ratio
    return OffloadConfig(device, **common)


def _param(section: Section, itemsize: int, ignored: dict[str, str]) -> OffloadConfig:
    device, numel = section.values["device"], section.whole("max_in_cpu")
    common = _common(section, "offload_param", device, ignored)
    if device == "cpu" or not numel:
        return OffloadConfig(device, **common)
    # CPU memory first, NVMe for the rest: what "auto" does with no room on the device.
    return OffloadConfig("auto", **common, max_in_device_bytes=0, max_in_cpu_bytes=numel * itemsize)


def _common(section: Section, name: str, device: str, ignored: dict[str, str]) -> dict[str, Any]:
    """Settings that both sections have. DeepSpeed takes any number of buffers of any size."""
    for key, why in _WITHOUT_EFFECT.items():
        if section.has(key):
            ignored[f"{name}.{key}"] = why
    settings: dict[str, Any] = {}
    if (is_pinned := section.flag("pin_memory")) is not None:
        settings["pin_memory"] = is_pinned
    read: dict[str, Callable[[], Any]] = {
        "nvme_path": lambda: _path(section),
        "buffer_count": lambda: max(section.whole("buffer_count") or 0, _LEAST_BUFFERS),
        "buffer_size": lambda: max(section.whole("buffer_size") or 0, _LEAST_BUFFER_SIZE),
    }
    for key in _NVME_ONLY:
        if not section.has(key):
            continue
        value = read[key]() if key in read else section.whole(key)
        if device == "cpu":
            ignored.setdefault(f"{name}.{key}", "it needs device nvme")
        elif key in read:
            settings[key] = value
    return settings


def _path(section: Section) -> str:
    path = section.values["nvme_path"]
    if not isinstance(path, str):
        raise section.error("nvme_path", "the path of a folder")
    return path
