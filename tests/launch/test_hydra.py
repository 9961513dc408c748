"""Hydra jobs on several ranks: one run directory, rank 0's settings, sweeps, torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed

from lightning_zero.health.tracebacks import print_once
from lightning_zero.launch.children import ProcessSnapshot
from lightning_zero.launch.hydra import check_launch
from tests.launch.test_launch import ROOT, run_script, start
from tests.support.ranks import free_port

APP = Path(__file__).parents[1] / "support" / "scripts" / "hydra_app" / "app.py"


def seen_by_ranks(run_dir):
    files = sorted(Path(run_dir).glob("rank*.json"))
    assert [file.name for file in files] == [f"rank{i}.json" for i in range(len(files))]
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    (tmp_path / "start").mkdir()
    monkeypatch.chdir(tmp_path / "start")


@pytest.mark.slow
def test_both_ranks_share_a_run_dir_with_odd_characters_after_chdir_and_flags_behind_overrides(
    tmp_path,
):
    run_dir = tmp_path / 'it\'s a = "run", {1} [2] \\ dir'
    quoted = str(run_dir).replace("'", "\\'")
    text = "a 'b' \"c\", d=e [f] \\g"
    text_override = "text='" + text.replace("'", "\\'") + "'"
    run_script(
        *(APP, "x=1", f"hydra.run.dir='{quoted}'", text_override),
        *("hydra.job.chdir=true", "+new.key=[1,2]", "--config-name", "other"),
    )
    assert run_dir.is_dir(), list(tmp_path.iterdir())
    ranks = seen_by_ranks(run_dir)
    assert [seen["world_size"] for seen in ranks] == [2, 2]
    expected = {"x": 1, "text": text, "name": "other", "new": {"key": [1, 2]}}
    assert ranks[1]["config"] == ranks[0]["config"] == ranks[0]["config"] | expected
    assert {seen["cwd"] for seen in ranks} == {str(run_dir)}
    assert {seen["output_dir"] for seen in ranks} == {str(run_dir)}
    assert {seen["job"] for seen in ranks} == {"app"}
    assert sorted(path.name for path in run_dir.iterdir()) == sorted(
        [".hydra", "app.log", "app_rank1.log", "rank0.json", "rank1.json"]
    )
    for log, other in (("app.log", 1), ("app_rank1.log", 0)):
        assert f"rank {1 - other} has trained" in (run_dir / log).read_text()
        assert f"rank {other} has trained" not in (run_dir / log).read_text()
    assert not list((tmp_path / "start").iterdir())


@pytest.mark.slow
@pytest.mark.shows("Hydra, sweeps with `-m`", stages=(3,))
def test_a_sweep_over_device_counts_runs_every_job_once_on_its_own_ranks(tmp_path):
    run_script(APP, "-m", "devices=2,1,2", "x=5", "hydra.sweep.dir=../sweep of mine", timeout_s=200)
    jobs = [seen_by_ranks(tmp_path / "sweep of mine" / str(job)) for job in range(3)]
    assert [[seen["world_size"] for seen in ranks] for ranks in jobs] == [[2, 2], [1], [2, 2]]
    assert [ranks[0]["config"]["devices"] for ranks in jobs] == [2, 1, 2]
    assert {ranks[0]["pid"] for ranks in jobs} == {jobs[0][0]["pid"]}
    for ranks in jobs:
        assert {seen["config"]["x"] for seen in ranks} == {5}
        assert {seen["parent"] for seen in ranks[1:]} <= {ranks[0]["pid"]}
        assert not any("devices=2,1,2" in seen["argv"] for seen in ranks[1:])
    logs = {path.name for path in (tmp_path / "sweep of mine").rglob("*.log")}
    assert logs == {"app.log", "app_rank1.log"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategies",
    [["ddp", "zero3"], ["zero3", "ddp", "zero1"]],
    ids=",".join,
)
def test_a_sweep_over_strategies_leaves_nothing_of_one_job_to_the_next(tmp_path, strategies):
    jobs = "+hydra.callbacks.jobs._target_=lightning_zero.launch.hydra_jobs.HydraJobs"
    sweep = [f"strategy={','.join(strategies)}", "devices=2", f"hydra.sweep.dir={tmp_path}/sweep"]
    run_script(APP, "-m", *sweep, jobs, timeout_s=200)
    for job, strategy in enumerate(strategies):
        ranks = seen_by_ranks(tmp_path / "sweep" / str(job))
        assert [seen["world_size"] for seen in ranks] == [2, 2]
        assert {seen["config"]["strategy"] for seen in ranks} == {strategy}


def test_variables_threads_and_process_group_of_a_launch_go_with_it(monkeypatch, tmp_path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "7")
    threads = torch.get_num_threads()
    before, hook = ProcessSnapshot.take(), sys.excepthook
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert sys.excepthook is not hook
    _set_num_threads_if_needed(2)
    torch.set_num_threads(threads + 1)
    os.environ |= {"LOCAL_RANK": "0", "MASTER_PORT": "8"}
    of_group = sys.excepthook
    print_once(ArithmeticError("7"), 0, lambda name: 1)  # rank 1 has printed this traceback
    assert sys.excepthook is not of_group
    assert os.environ["HYDRA_FULL_ERROR"] == "1"
    before.restore()
    assert not dist.is_initialized()
    assert sys.excepthook is hook
    assert torch.get_num_threads() == threads
    assert "OMP_NUM_THREADS" not in os.environ
    assert "HYDRA_FULL_ERROR" not in os.environ
    assert "LOCAL_RANK" not in os.environ
    assert os.environ["MASTER_PORT"] == "7"


def test_tasks_of_a_launcher_that_do_not_know_of_each_other_are_refused(monkeypatch):
    with initialize_config_dir(version_base="1.3", config_dir=str(APP.parent / "settings")):
        mode = ["hydra.mode=MULTIRUN", "hydra.launcher._target_=joblib_launcher.JoblibLauncher"]
        config = compose("config", overrides=mode, return_hydra_config=True)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", config)
    check_launch(1)
    with pytest.raises(RuntimeError, match=r"JoblibLauncher runs .*\.tasks_per_node=2"):
        check_launch(2)
    monkeypatch.setenv("SUBMITIT_LOCAL_NTASKS", "2")
    with pytest.raises(RuntimeError, match=r"as 2 task\(s\) in which ranks cannot be started"):
        check_launch(1)


@pytest.mark.slow
def test_a_launcher_whose_workers_cannot_start_ranks_is_refused_by_name(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra slurm")
    local = ["-m", "hydra/launcher=submitit_local", f"hydra.sweep.dir={tmp_path}/sweep"]
    with start(APP, *local, "devices=2", "x=1") as first:
        printed, _ = first.communicate(timeout=120)
    assert first.returncode != 0
    assert "LocalLauncher runs this job as 1 task(s) in which ranks cannot be started" in printed
    assert "hydra.launcher.tasks_per_node=2" in printed


_GONE = """
import os, sys
if os.environ.get("LOCAL_RANK") == "1":
    sys.exit(int(sys.argv[1]))
import lightning_zero.launch.children as children
from tests.support.fitting import make_trainer
from tests.support.models import MLPModule
children._GRACE_S = children._GRACE_AFTER_SUCCESS_S = 1.0
make_trainer("zero3", devices=2).fit(MLPModule(ranks=2))
"""


@pytest.mark.slow
def test_a_rank_that_is_gone_while_rank_0_needs_it_is_named_with_its_exit_code(tmp_path):
    (tmp_path / "gone.py").write_text(_GONE)
    with start(tmp_path / "gone.py", 0) as good, start(tmp_path / "gone.py", 3) as bad:
        for code, process in ((0, good), (3, bad)):
            printed, _ = process.communicate(timeout=120)
            assert process.returncode == -signal.SIGTERM
            assert f"rank 1 ended with exit code {code}, " in printed
            assert "all ranks of this node are terminated" in printed


@pytest.mark.slow
def test_under_torchrun_no_rank_is_started_again(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()]
    run_script(*torchrun, APP, "x=3", f"hydra.run.dir={tmp_path}/run")
    ranks = seen_by_ranks(tmp_path / "run")
    assert [seen["world_size"] for seen in ranks] == [2, 2]
    assert len({seen["parent"] for seen in ranks}) == 1
    assert ranks[0]["pid"] != ranks[1]["parent"]


@pytest.mark.slow
def test_a_module_run_by_name_and_a_config_dir_of_the_command_line_reach_the_children(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "extra.yaml").write_text("defaults: [config, _self_]\nname: extra\n")
    module = "tests.support.scripts.hydra_app.app"
    flags = ["--config-dir", "../mine", "--config-name", "extra"]
    run_script("-m", module, *flags, f"hydra.run.dir={tmp_path}/run")
    ranks = seen_by_ranks(tmp_path / "run")
    assert [seen["config"]["name"] for seen in ranks] == ["extra", "extra"]


@pytest.mark.slow
def test_a_rank_that_fails_before_training_ends_the_others(tmp_path):
    failing = tmp_path / "failing.py"
    failing.write_text(
        "import os\n"
        "import lightning_zero\n"
        "from tests.support.fitting import make_trainer\n"
        "from tests.support.models import MLPModule\n"
        "class Failing(MLPModule):\n"
        "    def setup(self, stage):\n"
        "        if self.trainer.global_rank == 0:\n"
        "            raise ArithmeticError('rank 0 alone')\n"
        "        open(f'{os.path.dirname(__file__)}/pid', 'w').write(str(os.getpid()))\n"
        "make_trainer('zero3', devices=2).fit(Failing(ranks=2))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, failing], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "ArithmeticError: rank 0 alone" in done.stderr
    pid = (tmp_path / "pid").read_text()
    assert not Path(f"/proc/{pid}").exists()
