"""The main job in a small size, and the text that it learns."""

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from gpt import GPT, GPTConfig
from language_model import ByteLanguageModel, share_of_lr
from stdlib_text import StdlibText

from lightning_zero.cli import main
from tests.support.hugging_face import llama
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SMALL = [
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "trainer.max_steps=6",
    "trainer.val_check_interval=3",
    "data.num_validation_windows=16",
    "data.batch_size=4",
]


def write_files(root, contents):
    for path, content in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


@pytest.fixture
def small_text(tmp_path):
    write_files(tmp_path, {f"module_{i}.py": f"x_{i} = {i}\n".encode() * 20 for i in range(60)})
    data = StdlibText(context=16, batch_size=4, num_validation_windows=10, root=str(tmp_path))
    data.setup("fit")
    return data


def run_in(folder, *command):
    """What it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def run_main_job(run_dir, *overrides, script="train.py"):
    return run_in(ROOT, f"examples/{script}", f"hydra.run.dir={run_dir}", *overrides)


def check_result(run_dir, printed):
    assert re.search(r"validation, bits per byte: model \d\.\d+, bigram table \d\.\d+", printed)
    assert printed.count("a continuation of 'class '") == 1  # rank 0 alone prints
    (checkpoint,) = (run_dir / "checkpoints").glob("step_*.ckpt")
    assert f"checkpoint: {checkpoint}\n" in printed
    assert printed.count(f"results: {run_dir}\n") == 1
    assert (run_dir / "checkpoints" / "last.ckpt").is_file()
    model = ByteLanguageModel.load_from_checkpoint(checkpoint, map_location="cpu")
    assert len(model.continuation(b"def ", num_bytes=5)) == 5
    columns = (run_dir / "csv" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert "val/bits_per_byte" in columns
    for rank, name in enumerate(("train.log", "train_rank1.log")):
        log = (run_dir / name).read_text()
        assert f"rank {rank} of 2 trains" in log
        assert "Seed set to 0" in log  # Lightning's own log lines are not on the terminal
    logged = yaml.safe_load((run_dir / "csv" / "hparams.yaml").read_text())
    assert logged["model/params/total"] == sum(p.numel() for p in model.parameters())
    assert logged["data"]["batch_size"] == 4
    assert logged["paths"]["output_dir"] == str(run_dir)  # resolved
    return logged["strategy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "zero",
    [*(pytest.param(f, marks=pytest.mark.slow) for f in ("off", "stage1", "stage2")), "stage3"],
)
def test_the_main_job_trains_on_two_ranks_with_every_stage(tmp_path, zero):
    traced = "callbacks.monitor.trace_steps=[2]"
    printed = run_main_job(tmp_path, *SMALL, f"zero={zero}", traced, "trainer.log_every_n_steps=3")
    strategy = check_result(tmp_path, printed)
    assert "lr-AdamW" in (tmp_path / "csv" / "metrics.csv").read_text()
    assert strategy["name"] == "ZeroStrategy"
    assert strategy["stage"] == (0 if zero == "off" else int(zero[-1]))
    for name in ("recordings/step_2_rank_1.json", "trace_step_2.png", "memory.png", "report.json"):
        assert (tmp_path / "zero" / name).is_file()
    assert f"{tmp_path}/zero/trace_step_2.png" in printed
    assert "exposed: compute waited" in printed
    assert [
        line.split()[:2] for line in printed.splitlines() if re.match(r"rank \d +\d", line)
    ] == [
        ["rank", "0"],
        ["rank", "1"],
    ]


@pytest.mark.slow
def test_the_path_that_a_run_prints_is_tested_on_another_number_of_ranks(tmp_path):
    brief = ["trainer.max_steps=2", "trainer.val_check_interval=2", "callbacks.monitor=null"]
    printed = run_main_job(tmp_path / "run", *SMALL, *brief, "test=true")
    (path,) = re.findall(r"^checkpoint: (\S+)$", printed, flags=re.MULTILINE)
    of_the_run = re.search(r"^test, bits per byte: model (\S+),", printed, flags=re.MULTILINE)
    words = [f"ckpt_path={path}", *SMALL, "trainer.devices=1", "zero=stage1"]
    printed = run_main_job(tmp_path / "eval", *words, script="eval.py")
    assert f"{of_the_run[0]} bigram table" in printed


@pytest.mark.slow
def test_a_run_goes_on_from_the_path_that_another_has_printed(tmp_path):
    printed = run_main_job(tmp_path / "first", *SMALL)
    (path,) = re.findall(r"^checkpoint: (\S+)$", printed, flags=re.MULTILINE)
    assert path.endswith("step_000006.ckpt")
    run_main_job(tmp_path / "second", *SMALL, f"ckpt_path={path}", "trainer.max_steps=9")
    assert (tmp_path / "second" / "checkpoints" / "step_000009.ckpt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("words", [["trainer.strategy=ddp"], ["trainer=ddp"]])
def test_the_main_job_trains_with_another_strategy(tmp_path, words):
    printed = run_main_job(tmp_path, *words, *SMALL)
    assert check_result(tmp_path, printed) == {"name": "DDPStrategy"}


@pytest.mark.slow
def test_the_main_job_is_compared_with_data_parallel(tmp_path):
    for name, words in (("ddp", ["trainer=ddp"]), ("zero3", ["zero=stage3"])):
        run_main_job(tmp_path / name, *SMALL, *words, "callbacks=fingerprints")
    runs = [str(tmp_path / name) for name in ("ddp", "zero3")]
    assert main(["compare", *runs, "--rtol", "1e-4"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["default", "fdr", "overfit"])
def test_debugging_trains(tmp_path, choice):
    fewer = ["data.num_validation_windows=16", "test=true"]
    fewer += ["trainer.max_epochs=25"] if choice == "overfit" else []
    printed = run_main_job(tmp_path, f"debug={choice}", *fewer)
    assert "test, bits per byte" in printed
    assert {path.name for path in tmp_path.iterdir()} == {".hydra", "train.log"}


@pytest.mark.slow
def test_optuna_searches_with_two_ranks_in_each_trial(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs the extra sweep")
    words = ["hparams_search=optuna", f"hydra.sweep.dir={tmp_path}", "hydra.sweeper.n_trials=2"]
    run_main_job(tmp_path, *words, *SMALL, "logger=none", "callbacks=none")
    found = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    assert set(found["best_params"]) == {"model.lr", "model.warmup"}
    assert 0 < found["best_value"] < 8


def test_no_file_is_in_both_parts(small_text):
    train, validation = (
        set(bytes(text.tolist()).splitlines())
        for text in (small_text.train_text, small_text.validation_text)
    )
    assert train
    assert validation
    assert not train & validation
    assert 50 < len(train | validation) < 60  # others are kept for a test


def test_no_file_of_the_test_is_in_another_part(small_text):
    small_text.setup("test")
    test = set(bytes(small_text.test_text.tolist()).splitlines())
    others = [small_text.train_text, small_text.validation_text]
    seen = {line for text in others for line in bytes(text.tolist()).splitlines()}
    assert test
    assert not test & seen
    assert len(test | seen) == 60
    assert len(list(small_text.test_windows())) == 10


@pytest.mark.parametrize("warmup", [0.1, 0.02])
def test_the_learning_rate_is_that_of_one_cycle(warmup):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2.0, total_steps=200, pct_start=warmup, cycle_momentum=False
    )
    for step in range(200):
        ours = 2.0 * share_of_lr(step, num_steps=200, warmup=warmup)
        assert ours == pytest.approx(theirs.get_last_lr()[0], rel=1e-6, abs=1e-9)
        optimizer.step()
        if step < 199:
            theirs.step()
    assert share_of_lr(300, num_steps=200, warmup=warmup) < 1e-5


def test_a_folder_without_text_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"got 0 bytes of training text; give data\.root"):
        StdlibText(root=str(tmp_path)).setup("fit")


@pytest.mark.slow
def test_a_llama_of_the_example_is_that_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 300, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden": 40}
    ours = GPT(GPTConfig(context=9, width=32, is_llama=True, **shape))
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=torch.finfo(torch.float32).eps,  # torch's default
        )
    )
    named = {
        "model.embed_tokens.weight": ours.tokens.weight,
        "model.norm.weight": ours.norm.weight,
        "lm_head.weight": ours.head.weight,
    }
    for number, block in enumerate(ours.blocks):
        q, k, v = block.qkv.weight.split([32, 16, 16])
        parts = {
            "input_layernorm": block.norm_1.weight,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": block.proj.weight,
            "post_attention_layernorm": block.norm_2.weight,
            "mlp.gate_proj": block.gate.weight,
            "mlp.up_proj": block.up.weight,
            "mlp.down_proj": block.down.weight,
        }
        named |= {f"model.layers.{number}.{name}.weight": part for name, part in parts.items()}
    theirs.load_state_dict(named)
    ids = torch.randint(300, (2, 9))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_the_main_job_learns_more_than_byte_pairs_in_three_minutes(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "train.py"), f"hydra.run.dir={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    model, bigram = map(float, re.search(r"model ([\d.]+), .* ([\d.]+)", done.stdout).groups())
    assert model < bigram - 0.5
    assert time.monotonic() - start < 180


def _run(rank, world_size, name, words):
    """What a script prints on this rank."""
    script = ROOT / "examples" / name
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.parent))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def run_script(name, *words):
    """What each of two ranks prints."""
    words = [*map(str, words), "--devices", "2"]
    return run_ranks(2, _run, name, words, has_group=False, timeout_s=200)


@pytest.fixture
def local_llama(tmp_path):
    """A directory as a download from Hugging Face: a small model of bytes, and its tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path / "llama"
    llama(vocab_size=len(vocabulary)).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    write_files(tmp_path / "texts", {"a.txt": b"To be or not to be. " * 40, "b/c.txt": b"x" * 99})
    return folder


@pytest.mark.slow
def test_a_llama_is_fine_tuned_from_one_directory_to_another(local_llama, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "tuned"
    words = ["--text", tmp_path / "texts", "--context", 16, "--steps", 4, "--lr", 1e-2]
    run_script("finetune_llama.py", local_llama, out, *words, "--precision", "32-true")
    before, after = map(AutoModelForCausalLM.from_pretrained, (local_llama, out))
    ids = AutoTokenizer.from_pretrained(out)("To be or not to be.", return_tensors="pt").input_ids
    losses = [model(input_ids=ids, labels=ids).loss.item() for model in (before, after)]
    assert losses[1] < losses[0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--qlora"]])
def test_adapters_are_trained_and_loaded_by_peft(local_llama, tmp_path, options):
    if options:
        pytest.importorskip("bitsandbytes")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    words = ["--text", tmp_path / "texts", "--context", 16, "--steps", 2, "--lr", 1e-2]
    run_script("lora.py", local_llama, tmp_path / "out", *words, *options, "--precision", "32-true")
    model = AutoModelForCausalLM.from_pretrained(local_llama)
    model = PeftModel.from_pretrained(model, tmp_path / "out")
    adapters = {name: p for name, p in model.named_parameters() if "lora_B" in name}
    assert len(adapters) == 4 * 7
    assert min(p.abs().max() for p in adapters.values()) > 0  # they begin at 0


@pytest.mark.slow
def test_a_vision_transformer_learns_shapes():
    small = ["--size", 16, "--width", 64, "--depth", 2, "--pictures", 1024, "--epochs", 2]
    printed, _ = run_script("vit.py", *small)
    assert float(re.search(r"accuracy: ([\d.]+)%", printed)[1]) > 45  # 33 by chance


@pytest.mark.slow
def test_a_checkpoint_is_resumed_with_other_settings_and_exported(tmp_path):
    printed, _ = run_script("checkpoints.py", tmp_path)
    assert "epochs: 2, resumed to 4" in printed
    assert f"weights of 8 tensors: {tmp_path / 'weights.safetensors'}" in printed


def test_ranks_run_different_experts():
    printed = run_script("moe.py", "--steps", 10, "--width", 16, "--depth", 2, "--experts", 6)
    ran = [re.search(r"experts of each layer (.*)", text)[1] for text in printed]
    assert ran[0] != ran[1]


@pytest.mark.slow
def test_two_forwards_of_a_student_and_an_ema_teacher_train_as_with_ddp():
    printed, _ = run_script("self_supervised.py", "--pictures", 64, "--epochs", 1)
    losses = re.findall(r"^\w+: loss ([\d.]+)", printed, flags=re.MULTILINE)
    assert len(losses) == 2
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-5)
    assert float(re.search(r"difference of a parameter: (.*)", printed)[1]) < 1e-5


def test_only_some_ranks_run_the_vision_tower_and_train_as_with_ddp():
    texts = run_script("multimodal.py", "--steps", 8, "--batch-size", 2)
    ran = [re.search(r"vision tower in steps (.*)", text)[1] for text in texts]
    assert ran[0] != ran[1]
    ddp, zero3 = map(float, re.findall(r"loss ([\d.]+)", texts[0]))
    assert zero3 == pytest.approx(ddp, rel=1e-5)


@pytest.mark.slow
def test_a_gan_with_two_optimizers_and_clipping_trains_as_with_ddp():
    printed, _ = run_script("gan.py", "--steps", 6, "--batch-size", 8)
    ddp, zero3 = map(float, re.findall(r"generator's loss ([\d.]+)", printed))
    assert zero3 == pytest.approx(ddp, rel=1e-5)
    assert float(re.search(r"difference of a parameter: (.*)", printed)[1]) < 1e-12


@pytest.mark.slow
def test_muon_with_accumulation_differs_from_one_process_by_rounding():
    words = ["--steps", "2"]
    printed, _ = run_ranks(2, _run, "muon.py", words, has_group=False, timeout_s=200)
    moved, differs, by_order = map(float, re.findall(r"by (\S+e-\d+)$", printed, re.MULTILINE))
    assert differs < 5 * by_order
    assert by_order < moved / 20


@pytest.mark.slow
def test_adapters_are_trained_with_the_frozen_weights_in_cpu_memory():
    pytest.importorskip("peft")
    words = ["--width", "32", "--layers", "2", "--steps", "3"]
    (printed,) = run_ranks(1, _run, "lora_offload.py", words, has_group=False, timeout_s=200)
    alone, offloaded = map(float, re.findall(r"loss ([\d.]+)", printed))
    assert offloaded == pytest.approx(alone, rel=1e-5)
    device, cpu = (
        float(re.search(rf"([\d.]+) MiB of model states, {tier}", printed)[1])
        for tier in ("device", "cpu")
    )
    assert device < cpu / 4


@pytest.mark.slow
def test_long_sequences_are_trained_with_activations_in_cpu_memory():
    small = ["--context", 256, "--width", 64, "--layers", 2, "--chunk", 100, "--steps", 2]
    for text in run_script("long_context.py", *small, "--min-bytes", 1024):
        kept = float(re.search(r"([\d.]+) MiB of activations", text)[1])
        assert kept * 2**20 > 2 * 256 * 64 * 2  # inputs of the blocks, in bfloat16


@pytest.mark.slow
def test_the_cells_of_the_notebook_train_and_have_the_weights(tmp_path):
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    source = ["import sys; sys.ps1 = '>>> '  # what Lightning knows an interactive session by"]
    source += ["".join(cell["source"]).replace("max_epochs=4", "max_epochs=1") for cell in cells]
    (tmp_path / "cells.py").write_text("\n\n".join(source))
    printed = run_in(tmp_path, "cells.py")
    error, largest = map(
        float, re.search(r"error ([\d.]+), of values up to (.*)", printed).groups()
    )
    assert error < largest / 2


@pytest.mark.slow
def test_a_project_of_its_own_takes_the_groups_of_the_package(tmp_path):
    shutil.copytree(ROOT / "examples" / "hydra_project", tmp_path / "project")
    words = ["model=large", "model.width=32", "zero=stage2", "offload=cpu_optimizer"]
    words += ["trainer.max_steps=4", "trainer.val_check_interval=2", "hydra.run.dir=run"]
    on_cpu = ["trainer.accelerator=cpu", "trainer.devices=2", "data.num=2048"]
    run_in(tmp_path / "project", "train.py", *words, *on_cpu)
    run = tmp_path / "project" / "run"
    assert (run / "checkpoints" / "step_000004.ckpt").is_dir()  # sharded, as it is offloaded
    logged = yaml.safe_load((run / "csv" / "hparams.yaml").read_text())
    assert logged["model"]["num_layers"] == 8
    assert logged["strategy"]["stage"] == 2
    assert logged["strategy"]["offload_optimizer"]


def test_every_example_is_short_and_is_run_here():
    scripts = [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples").glob("*/*.py")]
    tests = ["repository/test_examples.py", "repository/test_readme.py", "strategy/test_ray.py"]
    here = "".join((ROOT / "tests" / path).read_text() for path in tests)
    modules = {"gpt.py", "job.py", "language_model.py", "stdlib_text.py", "project.py"}
    for path in scripts:
        if path.name not in modules:
            assert path.name in here, path
            assert len(path.read_text().splitlines()) < 120, path
