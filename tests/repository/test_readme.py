"""What README.md and the pages of docs/ tell to type is what is tested."""

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec

import lightning.pytorch as pl
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import lightning_zero
from lightning_zero.observe.recordings import write_recording
from tests.support.composed import composed
from tests.support.fitting import make_trainer, settings
from tests.support.hugging_face import VOCABULARY, llama
from tests.support.pages import GUIDES, PAGES, README, ROOT, blocks
from tests.support.ranks import run_ranks
from tests.support.recordings import made_ranks

COMMANDS = [
    line for page in PAGES for block in blocks("bash", page) for line in block.splitlines() if line
]
LOOP_PAGE = f"{GUIDES}/loop.md"  # excerpts, which need their surroundings; tests/fabric runs one
OTHER = "import pytorch_lightning"  # a block that tests/strategy/test_distributions.py runs
RAY_PAGE = f"{GUIDES}/clusters.md"
SPECIAL_PAGES = [LOOP_PAGE]
if find_spec("ray") is None:
    SPECIAL_PAGES.append(RAY_PAGE)

SETUP = "python3 -m venv .venv && . .venv/bin/activate && pip install -e"
RUN_BY_CI = {
    f'{SETUP} ".[plot]" && python examples/train.py': "train",
    f'{SETUP} ".[test,dev]" && pytest -n auto -m "not slow"': "tests",
}
OVERRIDDEN = "python examples/train.py zero=stage2 bucket=large overlap=none trainer.devices=2"
LOOP = "torchrun --nproc-per-node 2 examples/loop.py"
CLI = [command for command in COMMANDS if command.startswith("lightning-zero ")]
SWEEP = "python examples/train.py -m trainer.devices=2,1"
TORCHRUN = (
    "torchrun --nproc-per-node 2 examples/train.py trainer.devices=2 hydra.run.dir=outputs/torchrun"
)
RAY = "python examples/ray_train.py --workers 2"  # run by tests/strategy/test_ray.py
# With --quick and two or four CPU ranks: tests/check/test_check.py, tests/slurm/test_check.py.
CHECK = {
    "lightning-zero check",
    "lightning-zero check --config my-llama/config.json --nvme-path /scratch",
    "torchrun --nproc-per-node=8 -m lightning_zero check",
    "srun --nodes=2 --ntasks-per-node=8 python -m lightning_zero check",
}
RUN_BY_A_TEST = {OVERRIDDEN, LOOP, SWEEP, TORCHRUN, RAY, *CLI, *CHECK}
# On a SLURM cluster, with the layout of the test's nodes: tests/slurm/test_examples.py.
RUN_ON_SLURM = {
    "sbatch --nodes=4 examples/slurm/multi_node.sbatch model.lr=2e-4",
    "PYTHONPATH=examples python examples/train.py -m hydra/launcher=slurm zero=stage2,stage3 "
    "trainer.devices=2 hydra.launcher.tasks_per_node=2",
}
# Composed here; test_examples.py and tests/observe/test_wandb_run.py train with such ones.
PRINTED = "/home/me/outputs/train/runs/2026-11-23_10-00-00/checkpoints/step_000800.ckpt"
COMPOSED = {
    "python examples/train.py trainer.max_epochs=1 trainer.limit_train_batches=200 "
    "trainer.accumulate_grad_batches=4",
    "python examples/train.py 'logger=[csv,wandb]' logger.wandb.project=mine 'tags=[baseline]'",
    f"python examples/train.py ckpt_path={PRINTED} trainer.max_steps=2400",
    f"python examples/eval.py ckpt_path={PRINTED}",
}
# By tests/repository/test_examples.py, where the sweeper is installed.
SEARCH = "python examples/train.py -m hparams_search=optuna hydra.sweeper.n_trials=20 logger=wandb"
SMALL = ["trainer.accelerator=cpu", "trainer.max_steps=2", "trainer.val_check_interval=2"]
SMALL += ["data.num_validation_windows=16"]
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8},
}


def run(arguments, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_every_command_is_run_by_ci_or_by_a_test():
    assert set(COMMANDS) == set(RUN_BY_CI) | RUN_BY_A_TEST | RUN_ON_SLURM | COMPOSED | {SEARCH}


@pytest.mark.parametrize("command", sorted(COMPOSED))
def test_what_stands_behind_a_command_composes(command):
    _, script, *overrides = shlex.split(command)
    name = "eval" if script.endswith("eval.py") else "train"
    config = composed(*overrides, name=name)
    for override in overrides:
        key, _, value = override.partition("=")
        if not value.startswith("["):
            assert str(OmegaConf.select(config, key)) == value


@pytest.mark.parametrize("command", RUN_BY_CI)
def test_ci_runs_the_commands_of_the_readme(command):
    assert f"\n{command}\n" in PAGES[README]
    name = RUN_BY_CI[command]
    assert f'  {name})\n    {command} "$@"\n' in (ROOT / ".ci" / "readme").read_text()
    assert f"\n.ci/readme {name}" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
def test_the_command_with_other_groups_trains(tmp_path):
    small = [*SMALL, f"hydra.run.dir={tmp_path}"]
    printed = run([sys.executable, *shlex.split(OVERRIDDEN)[1:], *small], ROOT)
    assert "rank 1" in printed


@pytest.mark.slow
def test_the_sweep_trains_every_job_on_its_own_number_of_devices(tmp_path):
    small = [*SMALL, f"hydra.sweep.dir={tmp_path}"]
    run([sys.executable, *shlex.split(SWEEP)[1:], *small], ROOT)
    logs = [sorted(path.name for path in (tmp_path / str(i)).glob("*.log")) for i in range(2)]
    assert logs == [["train.log", "train_rank1.log"], ["train.log"]]


@pytest.mark.slow
def test_the_example_trains_under_torchrun_in_one_directory(tmp_path):
    words = [*shlex.split(TORCHRUN)[1:-1], *SMALL, f"hydra.run.dir={tmp_path}"]
    run([sys.executable, "-m", "torch.distributed.run", *words], ROOT)
    assert {path.name for path in tmp_path.glob("*.log")} == {"train.log", "train_rank1.log"}


@pytest.mark.slow
def test_the_hand_written_loop_trains_under_torchrun():
    (excerpt,) = [block for block in blocks("python", LOOP_PAGE) if "Engine(" in block]
    loop = (ROOT / "examples" / "loop.py").read_text()
    for line in excerpt.splitlines():
        assert line.partition("  #")[0] in loop, line
    printed = run([sys.executable, "-m", "torch.distributed.run", *shlex.split(LOOP)[1:]], ROOT)
    losses = re.findall(r"rank \d: loss (\d+\.\d+), torch\.Size\(\[64, 8\]\)", printed)
    assert len(losses) == 2
    assert max(map(float, losses)) < 1.0  # a constant gives 4
    shares = [int(own) / int(total) for own, total in re.findall(r"(\d+) of (\d+) bytes", printed)]
    assert len(shares) == 2
    assert max(shares) < 0.6


def test_the_commands_of_lightning_zero_run(tmp_path, monkeypatch):
    from lightning_zero.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    state = {"state_dict": {"weight": torch.rand(4, 4)}, "epoch": 0, "global_step": 1}
    torch.save(state, "checkpoints/last.ckpt")
    for recording in made_ranks(2):
        write_recording(tmp_path / "outputs" / "my-run" / "zero", recording)
    report = (
        tmp_path / "outputs" / "train" / "multiruns" / "DATE_TIME" / "0" / "zero" / "report.json"
    )
    report.parent.mkdir(parents=True)
    report.write_text('{"stage": 3}')
    assert main(shlex.split("export checkpoints/last.ckpt sharded-checkpoint --format dcp")) == 0
    for command in set(CLI) - CHECK:
        # The model of the page is planned in tests/cli/test_plan.py.
        small = ["--model", "tiny"] if " plan " in command else []
        assert main([*shlex.split(command)[1:], *small]) == 0, command
    assert (tmp_path / "my-model" / "model.safetensors").is_file()
    assert (tmp_path / "for-fsdp" / ".metadata").is_file()
    assert torch.load("full.ckpt")["state_dict"]["weight"].equal(state["state_dict"]["weight"])
    project = (ROOT / "pyproject.toml").read_text()
    assert '[project.scripts]\nlightning-zero = "lightning_zero.cli:main"' in project


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks("python", page) and page not in SPECIAL_PAGES],
)
def test_the_python_of_a_page_runs_by_itself(page, tmp_path, monkeypatch):
    (tmp_path / "ds_config.json").write_text(json.dumps(DS_CONFIG))
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page", "MyModule": pl.LightningModule}
    for block in (block for block in blocks("python", page) if not block.startswith(OTHER)):
        exec(block.replace("devices=8", 'devices=2, accelerator="cpu"'), names)
        if "strategy=strategy" in block:
            assert names["trainer"].strategy is names["strategy"]
    if page == "docs/migration.md":
        assert names["strategy"].config.stage == 2
        assert names["trainer"].gradient_clip_val == 0.5
    if page.endswith("other-tools.md"):
        own = pl.Trainer(strategy="ddp_zero3", devices=2, accelerator="cpu").strategy
        assert isinstance(own, lightning_zero.ZeroStrategy)
        assert own.config.stage == 3


@pytest.mark.parametrize("page", [page for page in PAGES if blocks("diff", page)])
def test_a_change_to_a_script_is_right(page):
    for block in blocks("diff", page):
        lines = [line[1:] for line in block.splitlines() if line[:1] in ("", " ", "+")]
        runs = ("trainer.fit(", "trainer.test(")
        source = "\n".join(line for line in lines if not line.startswith(runs))
        ast.parse("\n".join(lines))
        names = {"MyLightningModule": pl.LightningModule}
        exec(source.replace("devices=8", 'devices=2, accelerator="cpu"'), names)
        assert type(names.get("strategy", "zero3")).__name__ in ("ZeroStrategy", "str")
        if "trainer" in names:
            assert type(names["trainer"].strategy).__name__ == "ZeroStrategy"


@pytest.mark.slow
def test_the_script_of_the_quickstart_trains_on_two_ranks(tmp_path):
    (script,) = blocks("python", "docs/quickstart.md")
    assert "`python regression.py`" in PAGES["docs/quickstart.md"]
    (tmp_path / "regression.py").write_text(script)
    printed = run([sys.executable, "regression.py"], tmp_path)
    assert "rank 1" in printed
    (line,) = re.findall(r"^zero3: .+$", PAGES["docs/quickstart.md"], flags=re.MULTILINE)
    assert f"{line}\n" in printed
    saved = torch.load(tmp_path / "regression.ckpt")
    assert saved["state_dict"]["net.4.weight"].shape == (1, 64)


def _fine_tune(rank, world_size, blocks_of_page, path):
    names = {"MyModule": pl.LightningModule}
    for block in blocks_of_page:
        exec(block, names)

    class Saving(names["Adapted"]):
        def on_train_epoch_end(self):
            with lightning_zero.gathered(self.model):
                if rank == 0:
                    self.model.save_pretrained("middle")

    model = Saving(path)
    data = torch.randint(VOCABULARY, (4, 8))
    make_trainer(settings(3), max_epochs=1).fit(model, DataLoader(data, batch_size=2))
    if rank == 0:
        model.model.save_pretrained("end")
        middle, end = (load_file(f"{name}/adapter_model.safetensors") for name in ("middle", "end"))
        assert all(torch.equal(middle[name], value) for name, value in end.items())
        return torch.cat([value.flatten() for name, value in end.items() if "lora_B" in name])


@pytest.mark.slow
def test_the_adapters_of_the_guide_are_trained_and_saved(tmp_path):
    pytest.importorskip("peft")
    llama().save_pretrained(tmp_path)
    page = blocks("python", f"{GUIDES}/fine-tuning.md")
    trained = run_ranks(2, _fine_tune, page, str(tmp_path), has_group=False, timeout_s=120)[0]
    assert trained.abs().min() > 0  # they begin at 0


def _compute_in_parts(rank, world_size, source):
    from lightning_zero import Engine, ZeroConfig

    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    module.head = torch.nn.Linear(4, 1)
    module.forward = lambda x: module[0](x)
    optimizer = torch.optim.SGD(module.parameters())
    engine = Engine(module, [optimizer], ZeroConfig(stage=3))
    x, y = torch.rand(16, 4), torch.rand(16, 1)
    loss_of = torch.nn.functional.mse_loss
    exec(source, {"engine": engine, "module": module, "x": x, "y": y, "loss_of": loss_of})
    engine.step()
    engine.zero_grad()
    engine.close()


def test_the_loss_in_chunks_runs():
    (excerpt,) = [b for b in blocks("python", LOOP_PAGE) if "forward_context" in b]
    run_ranks(2, _compute_in_parts, excerpt)


def test_the_project_on_the_page_is_the_one_in_examples():
    project = ROOT / "examples" / "hydra_project"
    page = f"{GUIDES}/hydra.md"
    for part in blocks("yaml", page)[0].split("\n\n"):
        assert part.strip() in (project / "conf" / "config.yaml").read_text()
    (code,) = blocks("python", page)
    source = (project / "train.py").read_text()
    for line in code.splitlines():
        assert line in source or line.startswith("def train("), line


def test_every_option_of_the_strategy_is_listed():
    table = PAGES[f"{GUIDES}/stages.md"].partition("## Options")[2].partition("## Automatic")[0]
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| .+ \| (.+) \|$", table, re.MULTILINE)))
    of_lightning = ["accelerator", "parallel_devices", "cluster_environment", "checkpoint_io"]
    names = set(inspect.signature(lightning_zero.ZeroStrategy).parameters)
    assert sorted(listed) == sorted(names - {*of_lightning, "precision_plugin"})


def test_pictures_are_there_and_small():
    pictures = {page: re.findall(r"!\[[^]]+\]\(([^)]+)\)", text) for page, text in PAGES.items()}
    assert pictures[README]
    for page, paths in pictures.items():
        for path in paths:
            picture = (ROOT / page).parent / path
            assert picture.read_bytes().startswith(b"\x89PNG")
            assert picture.stat().st_size < 60_000


def test_the_readme_is_one_screen_and_a_bit():
    assert len(PAGES[README].splitlines()) <= 105
    assert len(re.findall(r"!\[", PAGES[README])) == 1


def test_the_comparison_with_fsdp2_on_a_gpu_has_its_condition_everywhere():
    """The same sentence, with the same hardware, wherever the figure stands."""
    sentence = (
        "On one H200, as [rank 0 of 8 on a simulated group without communication](LINK), a step of "
        "stage 3 takes 0.91 times as long as one of FSDP2."
    )
    hardware = "have run on one H100 and one H200. **Several GPUs have not been tried yet.** "
    pages = [README, "docs/index.md"]
    for page in pages:
        text = " ".join(PAGES[page].replace("\n> ", " ").split())
        text = re.sub(r"\]\([^)]*2026-11-27-h200\.md\)", "](LINK)", text)
        assert hardware + sentence in text, page
    others = [page for page, text in PAGES.items() if "0.91 times" in text and page not in pages]
    assert others == ["docs/benchmarks.md"]
    (row,) = re.findall(r".*0\.91 times.*", PAGES["docs/benchmarks.md"])
    assert "rank 0 of 8 on a simulated group without communication" in row
