"""The command `lightning-zero`, as a user runs it."""

import json
import subprocess
import sys
from functools import partial

import pytest
import safetensors.torch
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_zero import load_from_checkpoint
from lightning_zero.cli import main
from tests.support.fitting import arrays, make_trainer, settings
from tests.support.models import ConvModule, GPTModule, MLPModule
from tests.support.warm import run_ranks

# What pip installs as `lightning-zero`.
AS_SCRIPT = """
import sys
from lightning_zero.cli import main
sys.exit(main())
"""


def run(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "a.ckpt"
    tied = torch.rand(100, 10)
    state = {"wte": tied, "head": tied, "bias": torch.rand(10, dtype=torch.float64)}
    moments = {0: {"step": torch.tensor(3.0), "exp_avg": torch.rand(100, 10)}}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save(
        {
            "state_dict": state, "optimizer_states": [optimizer], "epoch": 2, "global_step": 30,
            "pytorch-lightning_version": "2.6.1",
        },
        path,
    )  # fmt: skip
    return path


def test_export_prints_what_it_wrote(checkpoint, tmp_path, capsys):
    assert run("export", checkpoint, tmp_path / "hf", "--dtype", "bf16") == 0
    assert capsys.readouterr().out == f"{tmp_path}/hf: safetensors, 1.97 KiB of tensors\n"
    loaded = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert loaded["wte"].dtype == torch.bfloat16


def test_export_overwrites_only_with_force(checkpoint, tmp_path, capsys):
    out = tmp_path / "out.ckpt"
    out.write_bytes(b"before")
    assert run("export", checkpoint, out, "--format", "ckpt") == 2
    assert f"error: {out} exists; choose another path, or" in capsys.readouterr().err
    assert out.read_bytes() == b"before"
    assert run("export", checkpoint, out, "--format", "ckpt", "--force") == 0
    assert torch.load(out)["global_step"] == 30


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["export", "nothing", "out"], "error: nothing does not exist."),
        (["export", "a.ckpt", "a.ckpt", "--force"], "error: a.ckpt and a.ckpt overlap"),
        (["export", "a.ckpt", ".", "--force"], "overlap"),
        (["export", "a.ckpt", "out", "--ema"], "error: the checkpoint has no averaged weights"),
        (
            ["export", "text", "out"],
            "error: text is not a checkpoint: its first bytes are b'hello'",
        ),
        (["export", "empty", "out"], "empty is not a checkpoint: a directory that holds"),
        (
            ["export", "a.ckpt", "x.safetensors", "--max-shard-size", "1GB"],
            "error: --max-shard-size is for a directory",
        ),
        (
            ["export", "a.ckpt", "x", "--format", "dcp", "--max-shard-size", "1GB"],
            "error: --max-shard-size is for a directory",
        ),
        (["export", "a.ckpt", "x", "--max-shard-size", "much"], "got 'much'"),
        (["export", "a.ckpt", "x", "--max-shard-size", "0B"], "at least one byte"),
        (["export", "a.ckpt", "x", "--format", "onnx"], "invalid choice: 'onnx'"),
        (["export", "a.ckpt", "text/x"], "error: "),
        (["export", "odd.ckpt", "x"], "if you trust its source, use --trust."),
        (["inspect", "nothing"], "error: nothing does not exist."),
        (["inspect", "truncated.ckpt"], "truncated.ckpt"),
        (["inspect"], "the following arguments are required: CHECKPOINT"),
        ([], "print the content of a checkpoint"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, text, checkpoint, monkeypatch, capsys):
    monkeypatch.chdir(checkpoint.parent)
    (checkpoint.parent / "text").write_text("hello")
    (checkpoint.parent / "empty").mkdir()
    (checkpoint.parent / "truncated.ckpt").write_bytes(checkpoint.read_bytes()[:3000])
    torch.save({"state_dict": {}, "rich": Rich()}, checkpoint.parent / "odd.ckpt")
    before = sorted(checkpoint.parent.rglob("*"))
    try:
        status = main(arguments)
    except SystemExit as error:
        status = error.code
    assert status == 2
    printed = capsys.readouterr()
    assert text in printed.err
    assert not printed.out
    if "usage:" not in printed.err:
        assert printed.err.startswith(f"lightning-zero {arguments[0]}: error: ")
        assert printed.err.count("\n") == 1
    assert sorted(checkpoint.parent.rglob("*")) == before


class Rich:
    """A class that weights_only refuses."""


def test_trust_unpickles_any_class(tmp_path):
    torch.save({"state_dict": {"x": torch.ones(2)}, "rich": Rich()}, tmp_path / "rich.ckpt")
    assert run("export", tmp_path / "rich.ckpt", tmp_path / "x", "--trust") == 0


def test_inspect_prints_the_contents(checkpoint, capsys):
    assert run("inspect", checkpoint, "--verify") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        f"{checkpoint}: file of torch.save",
        "written by  Lightning 2.6.1",
        "progress    epoch 2, step 30",
        "weights     3 tensors, 1 tied",
        "            1,010 elements: float32 1,000, float64 10",
        "optimizer   float32 1,001",
        "bytes       parameters 3.98 KiB, optimizer 3.91 KiB, other 0 bytes",
        "largest     wte  100 x 10  float32",
        "            bias  10  float64",
        "entries     state_dict, optimizer_states, epoch, global_step, pytorch-lightning_version",
        printed[10],
        printed[11],
        "checksums   match",
    ]


def test_export_refuses_a_damaged_checkpoint_unless_verification_is_off(tmp_path, capsys):
    path = tmp_path / "a.ckpt"
    torch.save({"x": torch.full((64,), 7.0)}, path)
    data = path.read_bytes()
    path.write_bytes(data.replace(torch.full((64,), 7.0).numpy().tobytes(), bytes(255) + b"A"))
    with pytest.raises(ValueError, match="is damaged: record"):
        load_from_checkpoint(MLPModule, path)
    assert main(["export", str(path), str(tmp_path / "out")]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert main(["export", str(path), str(tmp_path / "out"), "--no-verify"]) == 0


def test_inspect_reports_damage_with_status_1(checkpoint, capsys):
    data = bytearray(checkpoint.read_bytes())
    weight = torch.load(checkpoint)["state_dict"]["wte"]
    data[data.index(weight.numpy().tobytes())] ^= 1
    checkpoint.write_bytes(data)
    assert run("inspect", checkpoint, "--verify", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert "data/0" in found["damage"][0]
    assert run("inspect", checkpoint) == 0
    assert run("inspect", checkpoint, "--verify") == 1
    assert "checksums  DAMAGED" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_runs_as_a_module_without_a_traceback(checkpoint):
    command = [sys.executable, "-m", "lightning_zero.cli", "inspect", "none"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "lightning-zero inspect: error: none does not exist.\n"


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["plan", "--help"], ["plan"]])
@pytest.mark.parametrize("program", [["-c", AS_SCRIPT], ["-m", "lightning_zero.cli"]])
def test_help_and_usage_errors_do_not_import_torch(program, arguments):
    command = [sys.executable, "-X", "importtime", *program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == (2 if arguments == ["plan"] else 0)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "lightning_zero.cli.options" in imported
    assert not imported & {"torch", "numpy", "lightning", "hydra", "omegaconf", "rich", "wandb"}


def test_inspect_prints_json(checkpoint, capsys):
    assert run("inspect", checkpoint, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters_numel"] == 1010
    assert found["files"] == {"a.ckpt": checkpoint.stat().st_size}
    assert "damage" not in found


def _save(rank, world_size, forms, factory, folder):
    for form in forms:
        seed_everything(7, verbose=False)
        trainer = make_trainer(settings(3, checkpoint=form), limit_train_batches=2)
        trainer.fit(factory())
        trainer.save_checkpoint(f"{folder}/{form}")


def _resume(rank, world_size, cases, factory):
    found = []
    for spec, path in cases:
        seed_everything(7, verbose=False)
        module = factory()
        trainer = make_trainer(spec, max_epochs=2, limit_train_batches=2)
        trainer.fit(module, ckpt_path=path)
        assert trainer.global_step == 4
        found.append(arrays(module.state_dict()))
    return found


PAIRS = [
    ("ddp", "full", "x.ckpt"),
    (settings(3), "sharded", "named"),
    (settings(2), "full", "numbered"),
]


@pytest.mark.parametrize("pairs", [PAIRS[1:2], pytest.param(PAIRS, marks=pytest.mark.slow)])
def test_training_resumes_from_an_exported_checkpoint_as_from_its_source(pairs, tmp_path, capsys):
    factory = partial(GPTModule, ranks=2, is_tied=True)
    run_ranks(2, _save, ["full", "sharded"], factory, str(tmp_path), has_group=False)
    assert run("inspect", tmp_path / "sharded", "--verify") == 0
    printed = capsys.readouterr().out
    assert "run        world size 2, stage 3" in printed
    assert "checksums  match" in printed
    assert ", 1 tied" in printed
    assert run("export", tmp_path / "sharded", tmp_path / "x.ckpt", "--format", "ckpt") == 0
    assert run("export", tmp_path / "full", tmp_path / "numbered", "--format", "dcp") == 0
    assert run("export", tmp_path / "sharded", tmp_path / "named", "--format", "dcp") == 0
    cases = [(spec, str(tmp_path / name)) for spec, *names in pairs for name in names]
    for results in run_ranks(2, _resume, cases, factory, has_group=False):
        for (_, _, exported), before, after in zip(pairs, results[::2], results[1::2], strict=True):
            for name, value in before.items():
                assert (after[name] == value).all(), (exported, name)


def _validate(rank, world_size, paths, factory):
    losses = []
    for path in paths:
        trainer = make_trainer(settings(3), limit_val_batches=1.0)
        result = trainer.validate(factory(), ckpt_path=path, verbose=False)
        losses.append(result[0]["val_loss"])
    return losses


def test_every_exported_format_validates_as_the_checkpoint_does(tmp_path):
    factory = partial(ConvModule, ranks=1)
    run_ranks(1, _save, ["full"], factory, str(tmp_path), has_group=False)
    path = tmp_path / "full"
    paths = [str(path)]
    for form in ("safetensors", "ckpt", "dcp"):
        paths.append(str(tmp_path / form))
        assert run("export", path, paths[-1], "--format", form) == 0
    losses = run_ranks(1, _validate, paths, factory, has_group=False)[0]
    assert losses == [losses[0]] * 4


def _average(rank, world_size, path):
    module = MLPModule(ranks=world_size)
    trainer = make_trainer("ddp", callbacks=[EMAWeightAveraging(decay=0.5)])
    saved = {}

    def save(*_):
        trainer.save_checkpoint(path)
        saved.update(arrays(module.state_dict()))

    module.on_train_epoch_end = save
    trainer.fit(module)
    return saved, torch.load(path)["state_dict"]


def test_ema_exports_the_averaged_weights(tmp_path, capsys):
    path = tmp_path / "a.ckpt"
    trained, average = run_ranks(2, _average, str(path), has_group=False)[0]
    assert run("export", path, tmp_path / "ema.safetensors", "--ema") == 0
    assert not capsys.readouterr().err
    assert run("export", path, tmp_path / "raw.safetensors") == 0
    assert "use --ema for the averaged ones" in capsys.readouterr().err
    ema = safetensors.torch.load_file(tmp_path / "ema.safetensors")
    raw = safetensors.torch.load_file(tmp_path / "raw.safetensors")
    for name, value in average.items():
        assert torch.equal(ema[name], value)
    assert any(not torch.equal(ema[name], raw[name]) for name in raw)
    current = torch.load(path)["current_model_state"]
    for name, value in raw.items():
        assert torch.equal(value, current[name])
    assert set(trained) == set(raw)
