"""Faults of the engine's use of streams, events and buffers, and which of them are found.

    python -m tests.streams.seeded_faults [WORD ...]

seeds each fault, or those whose text has one of the words, in a copy of the tree, trains the
scenarios of that fault there, and runs the tests that it names if these find nothing. Prints a
table. Exits with 1 if a fault is found by nothing.

A fault replaces a text that occurs once in its file. `test_seeded_faults.py` checks that it still
does.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from tests.streams import libraries
from tests.streams.checker import Checker, compiler, missing
from tests.streams.limits import complaints
from tests.streams.scenarios import ALL, Scenario

__all__ = ["FAULTS", "Fault", "scenario_of"]

ROOT = Path(__file__).parents[2]
_TREE = ("lightning_zero", "conf", "tests", "examples", "docs", "pyproject.toml")  # what is copied
_BY_NAME = {one.name: one for one in ALL}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        breaks: What is wrong then.
        file: File below lightning_zero/.
        old: Text that occurs there once.
        new: Text in its place.
        scenarios: Names of scenarios that are trained, in this order, until one finds the fault.
        tests: Tests that are run if none does.
    """

    breaks: str
    file: str
    old: str
    new: str
    scenarios: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()

    @property
    def num_places(self) -> int:
        """How often the text occurs."""
        return (ROOT / "lightning_zero" / self.file).read_text().count(self.old)

    def seed(self, root: Path) -> None:
        """Puts the fault into the tree below `root`."""
        path = root / "lightning_zero" / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.file} has {text.count(self.old)}: {self.old!r}"
        path.write_text(text.replace(self.old, self.new))


def scenario_of(name: str) -> Scenario:
    """The scenario of this name."""
    return _BY_NAME[name]


_BACKENDS, _BUCKET, _GRADIENTS = "comm/backends.py", "core/bucket.py", "core/gradients.py"
_COMMUNICATOR, _GUARD, _WORKER = "comm/communicator.py", "core/guard.py", "core/step_worker.py"
_STORAGE, _MEMORY, _PIPELINE = "tiers/storage.py", "tiers/memory.py", "tiers/pipeline.py"
_GRAD_OFFLOAD, _STATE_OFFLOAD, _NVME = (
    "tiers/grad_offload.py",
    "tiers/state_offload.py",
    "tiers/nvme.py",
)
_CHUNKS, _ACTIVATIONS = "optim/chunks.py", "activations.py"

_S1, _S2 = "stage 1, device, fp32, overlap", "stage 2, device, fp16, accumulate"
_S3, _GROUPS = "stage 3, device, fp32, plain", "stage 1, device, bf16, groups"
_FAILURES = "stage 3, device, fp32, failures in groups"
_CPU_STATES = "stage 3, cpu optimizer, fp16, clip"
_CPU_PARAMS = "stage 3, cpu parameters, bf16, accumulate"
_CPU_BOTH = "stage 3, cpu both, fp32, no group"
_NVME_PARAMS, _NVME_BOTH = (
    "stage 3, nvme parameters, fp32, plain",
    "stage 3, nvme both, bf16, overlap",
)
_NVME_STATES, _NVME_GRADS = (
    "stage 3, nvme optimizer, fp32, average",
    "stage 3, nvme gradients, fp32, plain",
)
_OVERLAP, _SAVED = "stage 3, device, fp32, overlap", "stage 3, device, fp16, activations"
_RATE = "stage 3, device, fp32, tensor rate"
_CPU_OVERLAP = "stage 2, cpu optimizer, bf16, overlap"
_CPU_WRITES = tuple(
    f"stage 3, {place}, fp32, {way}"
    for place in ("cpu both", "cpu parameters")
    for way in ("evaluation", "edits")
)
_FILES = "tests/tiers/test_files.py"
_TIERS = ("tests/tiers/test_pipeline.py", _FILES)

FAULTS = (
    # ------------------------------------------------------------------ streams of collectives
    Fault(
        "full tensors are used before the all-to-all has sent them",
        "core/full_tensors.py",
        "            self._pending.wait()\n",
        "",
        ("stage 3, device, bf16, muon",),
    ),
    Fault(
        "the copy into the buffer of an all-gather does not wait for compute",
        _BACKENDS,
        "with self._side_stream(self._copy_stream):",
        "with streams.on(self._copy_stream):",
        (_S3,),
    ),
    Fault(
        "an all-gather does not wait for the copy into its buffer",
        _BACKENDS,
        "self._side_stream(self._gather_stream, after=filled)",
        "streams.on(self._gather_stream)",
        (_S3,),
    ),
    Fault(
        "an all-gather waits for no event of the copy stream",
        _BACKENDS,
        "            stream.wait_event(after)\n",
        "            pass\n",
        (_S3,),
    ),
    Fault(
        "no side stream waits for compute",
        _BACKENDS,
        "            stream.wait_stream(streams.current(stream.device))\n",
        "            pass\n",
        (_S3,),
    ),
    Fault(
        "the end of the copy is recorded on the stream of compute",
        _BACKENDS,
        "else self._copy_stream.record_event()",
        "else streams.current(self._copy_stream.device).record_event()",
        (_S3,),
    ),
    Fault(
        "a reduce-scatter does not wait for the gradients",
        _BACKENDS,
        "with self._side_stream(self._reduce_stream):\n            began = self._recorder.mark()\n"
        "            if isinstance(",
        "with streams.on(self._reduce_stream):\n            began = self._recorder.mark()\n"
        "            if isinstance(",
        ("stage 3, device, fp32, unguarded",),
    ),
    Fault(
        "an all-reduce does not wait for the gradients",
        _BACKENDS,
        "with self._side_stream(self._reduce_stream):\n            began = self._recorder.mark()\n"
        "            if self._group is not None:\n                dist.all_reduce(",
        "with streams.on(self._reduce_stream):\n            began = self._recorder.mark()\n"
        "            if self._group is not None:\n                dist.all_reduce(",
        ("stage 0, device, fp32, unguarded",),
    ),
    Fault(
        "a collective has no event: compute does not wait for it",
        _BACKENDS,
        "event = stream.record_event() if stream is not None else None",
        "event = None",
        (_S3,),
    ),
    Fault(
        "compute does not wait for the event of a collective",
        _BACKENDS,
        ".wait_event(self.event)",
        "",
        (_S3,),
    ),
    Fault(
        "the end of a reduce-scatter is recorded before the sum is divided",
        _BACKENDS,
        "            self._finish_mean(out)\n"
        "            return self._make_pending(self._reduce_stream, began, out, *reads)",
        "            pending = self._make_pending(self._reduce_stream, began, out, *reads)\n"
        "            self._finish_mean(out)\n"
        "            return pending",
        (_S3,),
    ),
    Fault(
        "a reduce-scatter does not keep the gradients that it reads",
        _BACKENDS,
        "began, out, *reads)",
        "began, out)",
        (_S3, _S2),
    ),
    Fault(
        "collectives run on the stream of compute",
        _BACKENDS,
        "        return streams.on(stream)\n",
        "        return nullcontext()\n",
        (_S3,),
    ),
    Fault(
        "there is no stream for all-gathers",
        _BACKENDS,
        "self._gather_stream = streams.make_stream(device, is_high_priority=True)",
        "self._gather_stream = None",
        (_S3,),
    ),
    Fault(
        "there is no stream for reductions",
        _BACKENDS,
        "self._reduce_stream = streams.make_stream(device, is_high_priority=True)",
        "self._reduce_stream = None",
        (_S3,),
    ),
    Fault(
        "the host waits for the copy of a shard to the device",
        _BACKENDS,
        "own.copy_(source, non_blocking=True)",
        "own.copy_(source)",
        (_CPU_PARAMS,),
    ),
    Fault(
        "the host does not wait for uploads before it writes to their memory",
        _BACKENDS,
        "self._copy_stream.synchronize()",
        "pass",
        _CPU_WRITES,
    ),
    Fault(
        "gradients are looked at beside compute without a wait for it",
        _BACKENDS,
        "return self._side_stream(self._reduce_stream)",
        "return streams.on(self._reduce_stream)",
        (_S3,),
    ),
    Fault(
        "compute does not wait until gradients have been looked at",
        _BACKENDS,
        ".wait_stream(self._reduce_stream)",
        "",
        (_S2, "stage 1, device, fp32, accumulate"),
    ),
    Fault(
        "shards on the CPU are not known to be uploaded",
        "core/shards.py",
        "self._is_uploaded = storage.has_device_memory and plan.tiers.param is Tier.CPU",
        "self._is_uploaded = False",
        _CPU_WRITES,
    ),
    # ------------------------------------------------------------------ communicator
    Fault(
        "the host does not wait for the copies of a loss scaler",
        _COMMUNICATOR,
        "streams.current(self.device).synchronize()",
        "pass",
        (_CPU_STATES,),
    ),
    Fault(
        "a collective that is dropped after a failure does not keep its memory",
        _COMMUNICATOR,
        "self._discarded.append(pending)",
        "pass",
        (_FAILURES, "stage 2, device, fp32, failures"),
    ),
    Fault(
        "a loss scaler's copies are not waited for before gradients are unscaled",
        "tensors/sharded.py",
        "first.comm.wait_for_cpu_copies()",
        "pass",
        (_CPU_STATES,),
    ),
    # ------------------------------------------------------------------ buckets
    Fault(
        "parameters are used before their all-gather has ended",
        _BUCKET,
        "        self._pending.wait()\n        self._pending = None\n",
        "        self._pending = None\n",
        (_S3,),
    ),
    Fault(
        "an all-gather is issued before the overlapped step of its bucket",
        _BUCKET,
        "            self._overlapped.finish()\n        self.check_outside_transform()",
        "            pass\n        self.check_outside_transform()",
        (_RATE, _OVERLAP),
    ),
    Fault(
        "an all-gather is waited for where it is issued",
        _BUCKET,
        "self._pending = self.all_gather_params()\n",
        "self._pending = self.all_gather_params()\n        self._pending.wait()\n",
        (_S3,),
    ),
    Fault(
        "the step begins while copies of the shard to the device are read",
        _BUCKET,
        "        self.shards.before_write()\n        if self.shards_params:",
        "        if self.shards_params:",
        _CPU_WRITES,
    ),
    Fault(
        "memory is freed while an all-gather still fills it",
        _BUCKET,
        "        self.wait_for_unshard()\n        self.sync_writes()\n        self.enter_idle",
        "        self.sync_writes()\n        self.enter_idle",
        (_FAILURES, _S3),
    ),
    Fault(
        "nothing is prefetched",
        "core/unit.py",
        "while config.overlap_comm and (",
        "while False and (",
        (_S3,),
    ),
    # ------------------------------------------------------------------ gradients
    Fault(
        "a reduced gradient is added before it has been reduced",
        _GRADIENTS,
        "        pending.wait()\n        self._finish_average()",
        "        self._finish_average()",
        (_S3,),
    ),
    Fault(
        "a gradient is used before it has been averaged over replicas",
        _GRADIENTS,
        "            self._average.wait()\n",
        "",
        (_GROUPS,),
    ),
    Fault(
        "an offloaded gradient returns to the CPU before it has been averaged over replicas",
        _GRADIENTS,
        ".average_replicas(on_device, self._plan.name).wait()",
        ".average_replicas(on_device, self._plan.name)",
        ("stage 3, cpu optimizer, fp32, groups",),
    ),
    Fault(
        "after backward, an offloaded gradient is still on its way",
        _GRADIENTS,
        "        self._add_zeros_reduction()\n        if self._offloaded is not None:\n"
        "            self._offloaded.wait()\n",
        "        self._add_zeros_reduction()\n",
        ("stage 3, cpu optimizer, fp32, plain", _CPU_STATES),
    ),
    Fault(
        "a reduction that is dropped after a failure does not keep its memory",
        _GRADIENTS,
        "self._comm.discard(self._reduction[1])",
        "pass",
        (_FAILURES, "stage 2, device, fp32, failures"),
    ),
    # ------------------------------------------------------------------ look at gradients
    Fault(
        "the end of the copy of a look at gradients is not recorded",
        _GUARD,
        "            copied.record()\n",
        "",
        (_S3, "stage 3, device, fp32, skip"),
    ),
    Fault(
        "the end of the copy of a look at gradients is recorded before it begins",
        _GUARD,
        "        with self._comm.before_reduction():\n            maxima = ",
        "        copied.record()\n        copied.record = lambda: None\n"
        "        with self._comm.before_reduction():\n            maxima = ",
        (_S3, "stage 3, device, fp32, skip"),
    ),
    Fault(
        "the host does not wait for the result of a look at gradients",
        _GUARD,
        "                one.copied.synchronize()\n",
        "                pass\n",
        (_S3, "stage 3, device, fp32, skip"),
    ),
    Fault(
        "the host reads the result of a look at gradients while it is copied",
        _GUARD,
        "elif not one.copied.query():",
        "elif False:",
        (_S3,),
    ),
    Fault(
        "compute writes to gradients while they are looked at",
        _GUARD,
        "self._comm.wait_for_reductions()",
        "pass",
        (_S2, "stage 1, device, fp32, accumulate"),
    ),
    Fault(
        "the result of a look at gradients is copied to memory that is not page-locked",
        _GUARD,
        "pin_memory=True",
        "pin_memory=False",
        (_S3,),
    ),
    # ------------------------------------------------------------------ overlapped steps
    Fault(
        "an overlapped step does not wait for the gradients",
        _WORKER,
        "self._stream.wait_event(ready)",
        "pass",
        (_RATE,),
    ),
    Fault(
        "compute does not wait for the overlapped step of a bucket",
        _WORKER,
        ".wait_event(event)",
        "",
        (_RATE,),
    ),
    Fault(
        "the end of an overlapped step is not recorded",
        _WORKER,
        "event = streams.current(self._device).record_event() if is_cuda else None",
        "event = None",
        (_RATE,),
    ),
    Fault(
        "states are used before the overlapped step has ended",
        _WORKER,
        "            streams.current(self._device).wait_stream(self._stream)\n",
        "            pass\n",
        (_OVERLAP,),
    ),
    Fault(
        "gradients are freed while an overlapped step reads them",
        _WORKER,
        'self._kept = kept if device.type == "cuda" else None',
        "self._kept = None",
        (_RATE, _OVERLAP, _S1),
    ),
    Fault(
        "states of an overlapped step go back to its stream while compute uses them",
        _WORKER,
        "                    tensor.record_stream(current)\n",
        "                    pass\n",
        (_RATE, _OVERLAP),
    ),
    Fault(
        "an overlapped step runs on the stream of compute",
        _WORKER,
        "with streams.on(self._stream):",
        "with streams.on(None):",
        (_RATE,),
    ),
    # ------------------------------------------------------------------ steps on the CPU
    Fault(
        "the step on the CPU begins before the main parameters have arrived",
        _CHUNKS,
        "self._arrival.synchronize()",
        "pass",
        ("stage 3, cpu optimizer, fp32, plain",),
    ),
    Fault(
        "the arrival of main parameters is recorded before they are copied",
        _CHUNKS,
        "        self._master = self._to_device(stored)\n"
        '        if stored.device.type == "cuda" and',
        "        early = streams.current(stored.device) if stored.is_cuda else None\n"
        "        event = early.record_event() if early else None\n"
        "        self._master = self._to_device(stored)\n"
        "        if event is not None:\n            event.record = lambda: None\n"
        "            self._arrival = event\n"
        '        elif stored.device.type == "cuda" and',
        ("stage 3, cpu optimizer, fp32, plain",),
    ),
    Fault(
        "a file is written while stepped values are still copied to its buffer",
        _CHUNKS,
        "_write(target, self._master)",
        "target.copy_(self._master, non_blocking=True)",
        (_NVME_PARAMS, "stage 3, nvme parameters, bf16, plain"),
    ),
    Fault(
        "settings of an optimizer are copied to the CPU and not waited for",
        "optim/clone.py",
        "key: value.cpu() if",
        'key: value.to("cpu", non_blocking=True) if',
        (_CPU_STATES, "stage 3, cpu optimizer, fp32, tensor rate at once"),
    ),
    # ------------------------------------------------------------------ uploads
    Fault(
        "stepped parameters overwrite the old ones while these are read",
        _STORAGE,
        "        self._stream.wait_stream(current)",
        "        pass",
        ("stage 3, cpu optimizer, bf16, evaluation",),
    ),
    Fault(
        "stepped parameters are used while they are uploaded",
        _STORAGE,
        "            current.wait_stream(self._stream)\n",
        "            pass\n",
        (_CPU_OVERLAP,),
    ),
    Fault(
        "the host writes to a block that is still uploaded",
        _STORAGE,
        "                    left.synchronize()\n",
        "                    pass\n",
        ("stage 3, cpu optimizer, bf16, plain",),
    ),
    Fault(
        "the end of the upload of a block is not kept",
        _STORAGE,
        "self._blocks[0] = buffer, self._stream.record_event()",
        "self._blocks[0] = buffer, None",
        ("stage 3, cpu optimizer, bf16, plain",),
    ),
    Fault(
        "shards on the CPU are not page-locked",
        _STORAGE,
        "return aligned_empty(padded_bytes(numel, dtype), pin=pin).view",
        "return aligned_empty(padded_bytes(numel, dtype), pin=False).view",
        (_CPU_PARAMS,),
    ),
    Fault(
        "a shard is moved to the CPU and used there before it has arrived",
        _STORAGE,
        ".copy_(values)\n        elif tier is not",
        ".copy_(values, non_blocking=True)\n        elif tier is not",
        ("stage 3, cpu both, fp32, edits",),
    ),
    # ------------------------------------------------------------------ files
    Fault(
        "parameters are copied to the device before they have been read from their file",
        _STORAGE,
        "                    transfer.wait()\n",
        "                    pass\n",
        (_NVME_PARAMS, _NVME_BOTH),
    ),
    Fault(
        "a buffer is reused while parameters are copied from it to the device",
        _STORAGE,
        "left = streams.current(target.device).record_event()",
        "left = None",
        (_NVME_PARAMS, _NVME_BOTH),
    ),
    Fault(
        "the pool of buffers forgets the copies that read them",
        _MEMORY,
        "self._free.append((buffer, left))",
        "self._free.append((buffer, None))",
        (_NVME_PARAMS, _NVME_BOTH),
    ),
    Fault(
        "the pool of buffers does not wait for the copies that read them",
        _MEMORY,
        "            left.synchronize()\n",
        "            pass\n",
        (_NVME_PARAMS, _NVME_BOTH),
    ),
    Fault(
        "a buffer goes back to the pool while its file is still read into it",
        _STORAGE,
        "            transfer.wait_until_done()\n            self._pool.release(buffer)",
        "            self._pool.release(buffer)",
        (),
        (f"{_FILES}::test_a_read_ahead_that_is_dropped_ends_before_its_buffer_is_free",),
    ),
    Fault(
        "a job runs before its buffer has been read",
        _PIPELINE,
        "            for transfer in self.reads:\n                transfer.wait()\n",
        "",
        (_NVME_STATES,),
        _TIERS,
    ),
    Fault(
        "a buffer is read into while its last content is written",
        _PIPELINE,
        "view, after=self.writes)",
        "view, after=())",
        (_NVME_STATES, _NVME_BOTH),
        _TIERS,
    ),
    Fault(
        "a buffer is written to its file while the job runs",
        _PIPELINE,
        "        job.run(slot.views)\n        slot.begin_writes()\n",
        "        views = slot.views\n        slot.begin_writes()\n        job.run(views)\n",
        (_NVME_STATES,),
        _TIERS,
    ),
    Fault(
        "a write is not waited for before its buffer is reused",
        _PIPELINE,
        "        for transfer in self.writes:\n            transfer.wait_until_done()\n",
        "",
        (_NVME_STATES, _NVME_BOTH),
        _TIERS,
    ),
    Fault(
        "what was read before a write to the same bytes is used",
        _PIPELINE,
        "            if not any(transfer.is_stale for transfer in self.reads):\n",
        "            if True:\n",
        (),
        _TIERS,
    ),
    Fault(
        "a read does not wait for a write to the same bytes",
        _NVME,
        "if other.overlaps(new) and (is_write or other.is_write)",
        "if False",
        (),
        _TIERS,
    ),
    Fault(
        "a read does not wait for the last use of its buffer",
        _NVME,
        "            before += after\n",
        "",
        (),
        _TIERS,
    ),
    # ------------------------------------------------------------------ offloaded gradients
    Fault(
        "a gradient is copied to the CPU before it has been computed",
        _GRAD_OFFLOAD,
        "        self._stream.wait_stream(streams.current(source.device))\n",
        "",
        ("stage 3, cpu optimizer, fp32, plain",),
    ),
    Fault(
        "the host uses a gradient before it has arrived",
        _GRAD_OFFLOAD,
        "                pending.event.synchronize()\n",
        "                pass\n",
        ("stage 3, cpu optimizer, fp32, plain",),
    ),
    Fault(
        "the arrival of a gradient is recorded before it is copied",
        _GRAD_OFFLOAD,
        "        with streams.on(self._stream):\n            with moving(",
        "        event = self._stream.record_event()\n        event.record = lambda *_: None\n"
        "        self._stream.record_event = lambda: event\n"
        "        with streams.on(self._stream):\n            with moving(",
        ("stage 3, cpu optimizer, fp32, plain",),
    ),
    Fault(
        "a gradient is freed while it is copied to the CPU",
        _GRAD_OFFLOAD,
        "_GradTransfer(values, mean, event,",
        "_GradTransfer(values, values, event,",
        ("stage 3, cpu optimizer, fp32, plain",),
    ),
    Fault(
        "memory of a gradient is reused while its file is written",
        _GRAD_OFFLOAD,
        "                pending.transfer.wait()\n",
        "                pass\n",
        (_NVME_GRADS, "stage 3, nvme gradients, fp16, plain"),
        ("tests/tiers/test_offload.py",),
    ),
    Fault(
        "the host waits while a gradient is copied",
        _GRAD_OFFLOAD,
        "target.copy_(source, non_blocking=True)",
        "target.copy_(source)",
        (_CPU_STATES,),
    ),
    Fault(
        "gradients are copied on the stream of compute",
        _GRAD_OFFLOAD,
        "with streams.on(self._stream):",
        "with streams.on(None):",
        (_CPU_STATES,),
    ),
    # ------------------------------------------------------------------ saved activations
    Fault(
        "an activation is copied to the CPU before it has been computed",
        _ACTIVATIONS,
        "            self._stream.wait_stream(streams.current(self._device))\n",
        "            pass\n",
        (_SAVED,),
    ),
    Fault(
        "an activation is freed while it is copied to the CPU",
        _ACTIVATIONS,
        "self._source_stream.wait_event(self._copy_done)",
        "pass",
        (_SAVED,),
    ),
    Fault(
        "an activation is freed while it is copied back to the device",
        _ACTIVATIONS,
        "                tensor.record_stream(self._stream)\n",
        "",
        (_SAVED,),
    ),
    Fault(
        "backward uses an activation before it is back",
        _ACTIVATIONS,
        "            current.wait_event(self._fetch_done)\n",
        "",
        (_SAVED,),
    ),
    Fault(
        "the host waits while an activation is copied",
        _ACTIVATIONS,
        "self._copy.copy_(self._source, non_blocking=is_pinned)",
        "self._copy.copy_(self._source)",
        (_SAVED,),
    ),
    Fault(
        "activations are copied on the stream of compute",
        _ACTIVATIONS,
        "        return streams.on(self._stream)\n",
        "        return streams.on(None)\n",
        (_SAVED,),
    ),
    # ------------------------------------------------------------------ streams
    Fault(
        "no device has side streams",
        "record/streams.py",
        'if device.type != "cuda":',
        "if True:",
        (_S3,),
    ),
    Fault(
        "work is never queued on a side stream",
        "record/streams.py",
        "return nullcontext() if stream is None else torch.cuda.stream(stream)",
        "return nullcontext()",
        (_S3,),
    ),
)


# ------------------------------------------------------------------------ run


def _copy_of_tree(folder: Path) -> Path:
    root = folder / "tree"
    root.mkdir()
    for name in _TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, root / name)
    return root


def _judge(fault: Fault, built: Path) -> str:
    """What finds the fault; empty if nothing does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = _copy_of_tree(folder)
        fault.seed(root)
        checker = Checker(built, folder / "log", root)
        try:
            for scenario in map(scenario_of, fault.scenarios):
                found = complaints(scenario, checker.run(scenario))
                if found:
                    kinds = dict.fromkeys(text.partition(":")[0] for text in found)
                    return f"{', '.join(kinds)} in {scenario.name}"
        finally:
            checker.close()
        for test in fault.tests:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", test]
            if subprocess.run(command, cwd=root, capture_output=True).returncode == 1:
                return test
    return ""


def main(words: Sequence[str]) -> int:
    """Seeds the faults and prints the table."""
    if reason := missing():
        print(reason)
        return 2
    chosen = [f for f in FAULTS if not words or any(w in f"{f.file} {f.breaks}" for w in words)]
    found: Counter[str] = Counter()
    begin = monotonic()
    print("| fault | where | found by |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        path = compiler()
        assert path is not None
        built = libraries.build(path, Path(name))
        for fault in chosen:
            how = _judge(fault, built)
            kind = "test" if how.startswith("tests/") else how.partition(" in ")[0]
            found[kind.partition(",")[0] or "nothing"] += 1
            print(f"| {fault.breaks} | {fault.file} | {how or '**nothing**'} |", flush=True)
    num_found = len(chosen) - found["nothing"]
    by_kind = ", ".join(f"{kind} {number}" for kind, number in found.most_common())
    print(f"\n{num_found} of {len(chosen)} found ({by_kind}) in {monotonic() - begin:.0f} s")
    return int(num_found < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
