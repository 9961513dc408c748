"""Start and end of runs: names, launchers, notebooks, Ctrl-C and LightningCLI."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.fitting import fit_reference, make_trainer, settings
from tests.support.models import GPTModule, MLPModule
from tests.support.processes import run_python
from tests.support.ranks import free_port, run_ranks
from tests.support.waits import PACE

SCRIPTS = Path(__file__).parents[1] / "support" / "scripts"
ROOT = Path(__file__).parents[2]
NAMES = {f"zero{stage}{suffix}": stage for stage in (1, 2, 3) for suffix in ("", "_notebook")}


@contextlib.contextmanager
def start(*command):
    """Starts Python on `command` in its own session, which is killed at the end."""
    lightning = ("MASTER_", "NODE_", "LOCAL_", "WORLD_", "RANK", "TORCHELASTIC")
    env = {k: v for k, v in os.environ.items() if not k.startswith(lightning)}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    env["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=env,
        start_new_session=True,
        # Tests in a background job ignore SIGINT, and so do their child processes.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_script(*command, timeout_s=90):
    """Output of Python on `command`, which must succeed."""
    with start(*command) as process:
        output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output
    return output


def assert_saved_equals_ddp(folder):
    for rank, outcome in enumerate(fit_reference(2, partial(GPTModule, ranks=2))):
        saved = np.load(folder / f"rank{rank}.npz")
        np.testing.assert_allclose(saved["losses"], outcome.losses, rtol=1e-6)
        for name, value in outcome.state.items():
            np.testing.assert_allclose(saved[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", list(NAMES))
@pytest.mark.parametrize("change", [str.lower, str.upper])
def test_each_registered_name_gives_its_stage_before_any_process_group(name, change):
    import lightning_zero

    importlib.reload(lightning_zero)
    strategy = make_trainer("auto", strategy=change(name), devices=2).strategy
    assert type(strategy).__name__ == "ZeroStrategy"
    assert type(strategy).__module__.startswith("lightning_zero")
    assert strategy.config == lightning_zero.ZeroConfig(stage=NAMES[name])
    assert strategy.launcher.is_interactive_compatible == name.endswith("_notebook")
    assert not dist.is_initialized()


@pytest.mark.shows("launch by the Trainer", stages=(3,))
def test_the_subprocess_launcher_trains_on_two_ranks_as_ddp(fault_server, tmp_path):
    command = [SCRIPTS / "train.py", "zero3", 2, tmp_path]
    status, output = fault_server.run_script(command, tmp_path, num_started=1)
    assert status == 0, output
    assert_saved_equals_ddp(tmp_path)


@pytest.mark.shows("launch by torchrun", stages=(2,))
def test_torchrun_trains_on_two_ranks_as_ddp(fault_server, tmp_path):
    torchrun = ["torchrun", "--nproc-per-node", 2, "--master-port", free_port()]
    command = [*torchrun, SCRIPTS / "train.py", "zero2", 2, tmp_path]
    status, output = fault_server.run_script(command, tmp_path, num_started=2)
    assert status == 0, output
    assert_saved_equals_ddp(tmp_path)


@pytest.mark.default_cases("3-3")
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("stage", [0, 3])
def test_another_number_of_devices_than_was_launched_is_an_error_before_any_collective(
    devices, stage
):
    for text, had_group in run_ranks(2, _fit_devices, settings(stage), devices, has_group=False):
        assert text is not None
        assert str(devices) in text
        assert "2" in text
        assert not had_group


def _fit_devices(rank, world_size, spec, devices):
    try:
        make_trainer(spec, devices=devices).fit(MLPModule(ranks=devices))
    except ValueError as error:
        return str(error), dist.is_initialized()
    return None, dist.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param((1, 2), marks=pytest.mark.slow), (2, 1)])
def test_a_second_trainer_with_other_devices_is_an_error(devices):
    with start(SCRIPTS / "two_trainers.py", "zero3", *devices) as process:
        output, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    first, second = devices
    assert (
        f"Trainer(devices={second}, num_nodes=1) expects {second} ranks, but an earlier" in output
    )
    assert f"of this script started {first}, and a script starts its ranks only once" in output
    assert "torchrun" not in output


@pytest.mark.slow
def test_a_notebook_gets_lightnings_message_for_the_plain_name(tmp_path):
    with start(SCRIPTS / "notebook.py", "zero3", tmp_path) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "`Trainer(strategy='zero3')` is not compatible with an interactive" in output


@pytest.mark.slow
@pytest.mark.shows("launch in a notebook", stages=(1, 3))
@pytest.mark.parametrize(
    "name", [pytest.param("zero1_notebook", marks=pytest.mark.slow), "zero3_notebook"]
)
def test_a_notebook_trains_and_holds_the_trained_weights(name, tmp_path):
    run_script(SCRIPTS / "notebook.py", name, tmp_path)
    saved = np.load(tmp_path / "notebook.npz")
    expected = fit_reference(2, partial(GPTModule, ranks=2))[0].state
    assert list(saved) == list(expected)
    for name_, value in expected.items():
        np.testing.assert_allclose(saved[name_], value, rtol=1e-6, atol=1e-6, err_msg=name_)


@pytest.mark.slow
def test_ctrl_c_on_rank_0_ends_all_ranks(tmp_path):
    with start(SCRIPTS / "forever.py", "zero3", tmp_path) as process:
        pids = _wait_for(lambda: _pids(tmp_path) if len(_pids(tmp_path)) == 2 else None, 60)
        assert process.pid in pids
        os.kill(process.pid, signal.SIGINT)
        process.wait(timeout=30)
        assert process.returncode != 0
        _wait_for(lambda: not any(map(_is_alive, pids)), 15)


def _pids(folder):
    return [int(path.name.removeprefix("pid-")) for path in folder.iterdir()]


def _is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _wait_for(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)
    return value


@pytest.mark.shows("LightningCLI", stages=(3,))
def test_lightning_cli_parses_the_strategy_with_its_timeout_and_backend():
    pytest.importorskip("jsonargparse", reason="LightningCLI needs jsonargparse")
    for config, timeout_s, backend, num_losses in run_ranks(2, _run_cli, has_group=False):
        assert config == (3, 123_000, False)
        assert timeout_s == 77
        assert backend == "gloo"
        assert num_losses == 4


def _run_cli(rank, world_size):
    from lightning.pytorch.cli import LightningCLI

    strategy = {
        "stage": 3,
        "reduce_bucket_size": 123_000,
        "overlap_comm": "false",
        "timeout": "0:01:17",
        "process_group_backend": "gloo",
    }
    trainer = {
        "accelerator": "cpu",
        "devices": world_size,
        "max_epochs": 1,
        "logger": "false",
        "enable_checkpointing": "false",
        "enable_progress_bar": "false",
        "limit_val_batches": 0,
    }
    cli = LightningCLI(
        MLPModule,
        args=[
            "fit",
            f"--model.ranks={world_size}",
            "--trainer.strategy=lightning_zero.ZeroStrategy",
            *(f"--trainer.strategy.{key}={value}" for key, value in strategy.items()),
            *(f"--trainer.{key}={value}" for key, value in trainer.items()),
        ],
        save_config_callback=None,
    )
    config = cli.trainer.strategy.config
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options
    return (
        (config.stage, config.reduce_bucket_size, config.overlap_comm),
        options._timeout.total_seconds(),
        dist.get_backend(),
        len(cli.model.losses),
    )


def _meet_at_a_port_of_another_program(rank, world_size, is_ours_to_listen):
    from lightning_zero.health import world

    world._RENDEZVOUS_MARGIN_S *= PACE
    with socket.create_server(("127.0.0.1", 0)) as stranger:  # it accepts, and never answers
        os.environ["MASTER_PORT"] = port = str(stranger.getsockname()[1])
        own_rank = 0 if is_ours_to_listen else 1
        with pytest.raises(RuntimeError) as caught:
            world.open_store(own_rank, 2, timedelta(seconds=0.5))
    return port, str(caught.value)


@pytest.mark.default_cases("False")
@pytest.mark.parametrize("is_ours_to_listen", [True, False])
def test_a_port_that_another_program_has_is_an_error_that_names_the_address(is_ours_to_listen):
    (result,) = run_ranks(
        1, _meet_at_a_port_of_another_program, is_ours_to_listen, has_group=False, timeout_s=20
    )
    port, error = result
    assert f"could not meet the other ranks at 127.0.0.1:{port} (MASTER_ADDR" in error


_FAILING = """
import sys
import lightning_zero
from tests.support.fitting import make_trainer
from tests.support.models import MLPModule

class Module(MLPModule):
    def training_step(self, *args):
        number = self.global_rank if sys.argv[1] == "differently" else 7
        raise ArithmeticError(f"number {number}")

def main(config=None):
    make_trainer("zero3", devices=2).fit(Module(ranks=2))

if __name__ == "__main__":
    if sys.argv[1] == "+in=hydra":
        import hydra
        main = hydra.main(version_base="1.3", config_path=None)(main)
    main()
"""


_JOBS = "+hydra.callbacks.jobs._target_=lightning_zero.launch.hydra_jobs.HydraJobs"


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("equally", 1),
        pytest.param("differently", 2, marks=pytest.mark.slow),
        pytest.param("+in=hydra", 1, marks=pytest.mark.slow),
        pytest.param(f"+in=hydra {_JOBS}", 1, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_fail_in_the_same_way_print_one_traceback(fault_server, tmp_path, words, count):
    script = tmp_path / "failing.py"
    script.write_text(_FAILING)
    status, printed = fault_server.run_script([script, *words.split()], tmp_path, num_started=1)
    assert status == 1
    assert printed.count("Traceback") == count, printed
    assert printed.count("ArithmeticError: number") == 2  # one line for each rank
    assert printed.count("the traceback is that of rank") == 2 - count


_READING = """
import sys
import lightning_zero
from tests.support.fitting import make_trainer
from tests.support.models import MLPModule

class Module(MLPModule):
    def on_train_batch_end(self, *args):
        if self.global_rank == 0:
            print(next(self.parameters()).norm())  # alone

if __name__ == "__main__":
    make_trainer("zero3", devices=2).fit(Module(ranks=2))
"""


_READING_BY_HAND = """
import torch
import torch.distributed as dist
from lightning_zero import Engine, ZeroConfig

dist.init_process_group("gloo")
module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
engine = Engine(module, [torch.optim.SGD(module.parameters(), lr=0.1)], ZeroConfig(stage=3))

def look():
    if dist.get_rank() == 0:
        print(next(module.parameters()).norm())  # alone

for _ in range(3):
    engine.backward(module(torch.ones(2, 4)).sum())
    engine.step()
    look()
"""
TORCHRUN = ["torchrun", "--nproc-per-node", "2", "--master-port"]


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_a_read_on_rank_0_alone_prints_the_call_the_cure_and_the_lines_of_the_user(
    fault_server, tmp_path, is_by_hand
):
    script, text = tmp_path / "reading.py", _READING_BY_HAND if is_by_hand else _READING
    script.write_text(text)
    (number,) = [n for n, line in enumerate(text.splitlines(), 1) if "# alone" in line]
    argv = [*TORCHRUN, free_port(), script] if is_by_hand else [script]
    status, printed = fault_server.run_script(argv, tmp_path, num_started=1 + is_by_hand)
    assert status == 1
    for rank in range(2):
        lines = [
            x.removeprefix(f"[rank{rank}]: ")
            for x in printed.splitlines()
            if x.startswith(f"[rank{rank}]: ")
        ]
        first, cure, *rest = lines
        assert "DesynchronizedError: rank 0 reached p.data.norm() of " in first
        assert f", {script}:{number}; not every rank did" in first
        assert cure.startswith(
            "To read parameters on some ranks only, enter `with lightning_zero.g"
        )
        files = [line for line in rest if line.strip().startswith("File ")]
        assert all(str(script) in line or "/tests/support/" in line for line in files), files
    caller = "look" if is_by_hand else "on_train_batch_end"
    assert f'File "{script}", line {number}, in {caller}' in printed
    assert len([line for line in printed.splitlines() if line.startswith("[rank")]) <= 30
    assert "Traceback" not in printed or is_by_hand  # torchrun prints its own
    assert "stops because" not in printed


# ---------------------------------------------------------------- processes of multiprocessing

MODEL = """
from lightning.pytorch.demos.boring_classes import BoringModel

class Model(BoringModel):
    pass
"""
PROCESSES = """
import sys

if __name__ == "__main__":  # a spawned process runs the rest of this script again
    import lightning.pytorch as pl
    import lightning_zero
    from model import Model

    zero = lightning_zero.ZeroStrategy(3, start_method=sys.argv[1])
    options = dict(accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    trained = []
    for strategy in (zero, "ddp_fork"):
        pl.seed_everything(1)
        model = Model()
        before = model.layer.weight.clone()
        pl.Trainer(strategy=strategy, max_steps=2, limit_val_batches=0, **options).fit(model)
        assert not model.layer.weight.equal(before)
        trained.append(model.layer.weight)
    assert trained[0].allclose(trained[1], rtol=1e-6, atol=1e-6)
"""


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_spawned_ranks_train_as_under_ddp_and_return_the_weights(start_method, tmp_path):
    """Each rank imports torch and Lightning: most of the time, and minutes on a busy machine."""
    (tmp_path / "model.py").write_text(MODEL)
    script = tmp_path / "train.py"
    script.write_text(PROCESSES)
    run_python(script, start_method)
