"""The main job in a small size, and the text that it learns."""

import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from gpt import GPT, GPTConfig
from language_model import ByteLanguageModel
from stdlib_text import StdlibText, bigram_bits_per_byte, read_files

ROOT = Path(__file__).parents[1]
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


def run_main_job(run_dir, *overrides, timeout_s=240):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "examples/train.py", f"hydra.run.dir={run_dir}", *overrides]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def check_result(run_dir, printed):
    assert re.search(r"validation, bits per byte: model \d\.\d+, bigram table \d\.\d+", printed)
    assert printed.count("a continuation of 'class '") == 1  # rank 0 alone prints
    (checkpoint,) = (run_dir / "checkpoints").glob("*.ckpt")
    model = ByteLanguageModel.load_from_checkpoint(checkpoint, map_location="cpu")
    assert len(model.continuation(b"def ", num_bytes=5)) == 5
    assert "val/bits_per_byte" in (run_dir / "csv" / "metrics.csv").read_text()


@pytest.mark.parametrize(
    "zero",
    [*(pytest.param(f, marks=pytest.mark.slow) for f in ("off", "stage1", "stage2")), "stage3"],
)
def test_the_main_job_trains_on_two_ranks_with_every_stage(tmp_path, zero):
    traced = "callbacks.monitor.trace_steps=[2]"
    printed = run_main_job(tmp_path, *SMALL, f"zero={zero}", traced)
    check_result(tmp_path, printed)
    for name in ("recordings/step_2_rank_1.json", "trace_step_2.png", "memory.png", "report.json"):
        assert (tmp_path / "zero" / name).is_file()
    assert f"{tmp_path}/zero/trace_step_2.png" in printed
    assert "exposed is time for which the computation waited" in printed
    assert [line.split()[:2] for line in printed.splitlines() if line.startswith("rank ")] == [
        ["rank", "0"],
        ["rank", "1"],
    ]


@pytest.mark.slow
def test_the_main_job_trains_with_another_strategy(tmp_path):
    overrides = ["trainer.strategy=ddp", "~callbacks.monitor", "model.is_fused=false"]
    check_result(tmp_path, run_main_job(tmp_path, *SMALL, *overrides))


def test_only_text_outside_tests_and_installed_packages_is_read(tmp_path):
    kept = {"a.py": b"a", "b/c.rst": b"c", "b/d.txt": b"d", "e.md": b"e"}
    skipped = {"f.so": b"", "test/g.py": b"", "b/tests/h.py": b"", "site-packages/i/j.py": b""}
    write_files(tmp_path, {**kept, **skipped})
    assert dict(read_files(tmp_path)) == kept


def test_no_file_is_in_both_parts(small_text):
    train, validation = (
        set(bytes(text.tolist()).splitlines())
        for text in (small_text.train_text, small_text.validation_text)
    )
    assert train
    assert validation
    assert not train & validation
    assert len(train | validation) == 60


def test_random_crops_are_fixed_by_the_seed(small_text):
    def crops(seed):
        small_text.seed = seed
        return torch.stack(list(small_text.train_dataloader().dataset))

    first = crops(0)
    assert first.shape[1] == small_text.context + 1
    assert torch.equal(first, crops(0))
    assert not torch.equal(first, crops(1))


def test_validation_windows_reach_from_the_first_to_the_last_byte(small_text):
    windows = list(small_text.validation_windows())
    assert len(windows) == 10
    assert torch.equal(windows[0], small_text.validation_text[:17])
    assert torch.equal(windows[-1], small_text.validation_text[-17:])


def test_a_folder_without_text_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"got 0 bytes of training text; give data\.root"):
        StdlibText(root=str(tmp_path)).setup("fit")


def test_the_bigram_table_gives_the_bits_counted_by_hand(small_text):
    windows = small_text.validation_windows()
    counts = np.ones((256, 256))
    train = small_text.train_text.tolist()
    for seen, byte in itertools.pairwise(train):
        counts[seen, byte] += 1
    bits = [
        -np.log2(counts[seen, byte] / counts[seen].sum())
        for window in windows
        for seen, byte in itertools.pairwise(window.tolist())
    ]
    assert bigram_bits_per_byte(small_text.train_text, windows) == pytest.approx(np.mean(bits))


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
@pytest.mark.timeout(600)
def test_the_main_job_learns_more_than_byte_pairs_in_five_minutes(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "train.py"), f"hydra.run.dir={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    model, bigram = map(float, re.search(r"model ([\d.]+), .* ([\d.]+)", done.stdout).groups())
    assert model < bigram - 0.5
    assert time.monotonic() - start < 300
