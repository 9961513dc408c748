"""`lightning-zero plan`, as a user runs it."""

import json
import os
import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hydra.utils import instantiate

from examples.gpt import GPT, GPTConfig
from lightning_zero import ZeroStrategy
from lightning_zero.cli import main
from lightning_zero.cli.options import add_commands
from lightning_zero.cli.plan import source_from_arguments
from lightning_zero.planner import (
    SHAPES,
    Decoder,
    DecoderShape,
    EngineRuns,
    all_choices,
    shape_of_hugging_face,
)
from tests.support.composed import composed
from tests.support.planned import ViT

ROOT = Path(__file__).parents[2]
MIB = 1024**2
DEVICE_BYTES = 10 * MIB  # on which some choices fit SMALL with activation checkpointing only
OF_TWO = ["--context", "32", "--ranks", "2"]
SMALL = ["--model", "two_blocks", "--batch", "64", *OF_TWO]
A_BLOCK = ["--model", "a_block", *OF_TWO]
ADAFACTOR = [*A_BLOCK, "--optimizer", "adafactor", "--average", "cpu"]
LLAMA = ["--model", "llama2_70b", "--ranks", "8", "--host-memory", "512GiB", "--disk", "2TB"]
# A class for --module, importable from the root of the repository.
VIT = "tests.support.planned:ViT"
LINEAR = ["--module", "torch.nn:Linear", "--arg", "in_features=8", "--arg", "out_features=8"]


class SharedRuns(EngineRuns):
    """Takes what another plan has counted.

    Args:
        known: Results of plans with these arguments.
        *args: Arguments of `EngineRuns`.
        **settings: Arguments of `EngineRuns`.
    """

    def __init__(self, known, *args, **settings):
        super().__init__(*args, **settings)
        self._known = known.setdefault(self._step is None, {})


KNOWN: dict[tuple[str, ...], dict[bool, Any]] = {}
# Arguments that the engine's runs do not get.
FLAGS, LIMITS = ("--json", "--all"), ("memory", "disk", "gb-per-s", "plot")


def run_plan(*arguments):
    """The command, with what an earlier plan of the same job has counted."""
    kept, words = [], iter(arguments)
    for word in words:
        if word.startswith("--") and word.endswith(LIMITS):
            next(words)
        elif word not in FLAGS:
            kept.append(word)
    shared = partial(SharedRuns, KNOWN.setdefault(tuple(kept), {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_zero.cli.plan.EngineRuns", shared)
        return main(["plan", *arguments])


def plan(capsys, *arguments, status=0):
    assert run_plan(*arguments, "--json") == status
    return json.loads(capsys.readouterr().out)


def choice(found, zero, offload="none"):
    (one,) = [c for c in found["choices"] if (c["zero"], c["offload"]) == (zero, offload)]
    return one


def rest(one, tier):
    return sum(one["state_bytes_per_rank"].get(tier, {}).values())


def planned_once(*arguments):
    with redirect_stdout(StringIO()) as printed:
        assert run_plan(*arguments, "--json") == 0
    return json.loads(printed.getvalue())


@pytest.fixture(scope="module", autouse=True)
def _small_shapes():
    """Two more models for --model: the time of a plan grows with the number of blocks."""
    shape = partial(DecoderShape, 64, num_heads=4, vocab_size=128, hidden=96, is_gated=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, num_layers in (("a_block", 1), ("two_blocks", 2)):
            patch.setitem(SHAPES, name, shape(num_layers=num_layers))
        yield


@pytest.fixture
def without_offload(monkeypatch):
    """Plans four choices instead of thirteen."""

    def stages(base):
        return [choice for choice in all_choices(base) if choice.offload == "none"]

    monkeypatch.setattr("lightning_zero.cli.plan.all_choices", stages)


@pytest.fixture(scope="module")
def llama():
    """Llama 2 70B in float32 on 8 devices of 24 GiB, once for all tests."""
    rest = ["--precision", "32-true", "--device-memory", "24GiB", "--context", "512"]
    return planned_once(*LLAMA, *rest)


@pytest.fixture(scope="module")
def small():
    """A small model and slow host memory, planned where a use of a device is an error."""

    def refuse(*args, **kwargs):
        raise AssertionError("the planner must not use a device")

    KNOWN.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "init", refuse)
        return planned_once(*SMALL, "--memory-gb-per-s", "0.001")


@dataclass
class Plotted:
    found: dict[str, Any]
    path: Path
    figure: Any


@pytest.fixture(scope="module")
def large_batch(tmp_path_factory):
    """A large batch on devices which it fits with activation checkpointing only, with a plot."""
    pytest.importorskip("matplotlib", reason="an optional extra, plot")
    from matplotlib.figure import Figure

    drawn, write = [], Figure.savefig

    def savefig(figure, *args, **kwargs):
        drawn.append(figure)
        write(figure, *args, **kwargs)

    path = tmp_path_factory.mktemp("plan") / "plan.png"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", savefig)
        limit = ["--device-memory", f"{DEVICE_BYTES // MIB}MiB"]
        found = planned_once(*SMALL, *limit, "--plot", str(path))
    return Plotted(found, path, drawn[0])


@pytest.mark.slow
def test_llama_2_70b_does_not_fit_eight_devices_of_24_gib_without_offload(llama):
    assert llama["parameters"] == 68_976_648_192
    stage3 = choice(llama, "stage3")
    assert rest(stage3, "device") == pytest.approx(16 * 68.98e9 / 8, rel=0.001)  # 138 GB
    assert not stage3["fits"]
    assert not stage3["fits_with_checkpointing"]


@pytest.mark.slow
def test_it_fits_with_everything_on_nvme_and_the_plan_has_the_bytes(llama):
    in_memory = choice(llama, "stage3", "cpu")
    assert in_memory["host_bytes_per_node"] == pytest.approx(16 * 68.98e9, rel=0.001)  # 1.1 TB
    assert "host memory" in in_memory["missing_bytes"]
    nvme = choice(llama, "stage3", "nvme")
    assert nvme["fits_with_checkpointing"]
    assert nvme["disk_bytes_per_node"] == pytest.approx(12 * 68.98e9, rel=0.001)
    buffers = 8 * 2 * 4 * 2**24 * 4  # ranks, pools, buffers, elements, bytes
    assert nvme["host_bytes_per_node"] - buffers == pytest.approx(4 * 68.98e9, rel=0.03)
    assert llama["best"]["choice"].startswith("stage3, offload=nvme")


@pytest.mark.slow
def test_what_a_rank_sends_is_two_and_three_times_the_parameters(llama):
    numel_bytes = 4 * 68.98e9 * 7 / 8
    for zero in ("off", "stage1", "stage2"):
        assert choice(llama, zero)["step_bytes"]["wire"] == pytest.approx(
            2 * numel_bytes, rel=0.001
        )
    # The root and the last block stay unsharded from forward to backward.
    assert choice(llama, "stage3")["step_bytes"]["wire"] == pytest.approx(3 * numel_bytes, rel=0.02)


def test_states_are_sharded_by_stage_3_and_move_to_cpu_memory_or_files(small):
    numel = small["parameters"]
    assert rest(choice(small, "stage3"), "device") == pytest.approx(16 * numel / 2, rel=0.01)
    in_memory, in_files = choice(small, "stage3", "cpu"), choice(small, "stage3", "nvme")
    assert rest(in_memory, "device") < 0.01 * 16 * numel  # vectors
    in_cpu = in_memory["state_bytes_per_rank"]["cpu"]
    assert in_cpu["optimizer"] == pytest.approx(12 * numel / 2, rel=0.02)
    on_disk = in_files["state_bytes_per_rank"]["nvme"]
    assert on_disk["optimizer"] == pytest.approx(12 * numel / 2, rel=0.02)
    assert in_files["disk_bytes_per_node"] == 2 * sum(on_disk.values())


@pytest.mark.usefixtures("without_offload")
def test_micro_batches_multiply_what_the_stage_sends_in_each(capsys):
    one, two = (plan(capsys, *A_BLOCK, "--micro-batches", number) for number in ("1", "2"))
    # Stage 2 sends 4 bytes of a gradient in each, and 2 of the parameter once, as stage 3 does with
    # vectors in float32.
    for zero, ratio in (("off", 1), ("stage1", 1), ("stage2", 10 / 6), ("stage3", 2)):
        sent = [choice(found, zero)["step_bytes"]["wire"] for found in (one, two)]
        assert sent[1] / sent[0] == pytest.approx(ratio, rel=0.005), zero


def test_stepping_on_the_cpu_takes_the_time_that_its_memory_needs(small):
    one = choice(small, "stage2", "cpu_optimizer")
    seconds = 2 * one["step_bytes"]["cpu_step"] / 1e6  # of 2 ranks, on one memory
    assert one["transfer_seconds"][0] == pytest.approx(seconds)


def test_checkpointing_lowers_activations_only(large_batch):
    one = choice(large_batch.found, "stage2")
    assert one["device_bytes_with_checkpointing"] < one["device_bytes"]
    saved = one["device_bytes"] - one["device_bytes_with_checkpointing"]
    assert saved < one["peak_bytes"]["activations"]


def test_the_printed_strategy_enables_checkpointing_where_only_that_fits(large_batch):
    assert min(one["device_bytes"] for one in large_batch.found["choices"]) > DEVICE_BYTES
    best = large_batch.found["best"]
    assert best["checkpointing"]
    assert best["strategy"].endswith(", activation_checkpointing=True)")
    strategy = eval(best["strategy"], {"ZeroStrategy": ZeroStrategy})
    assert strategy.config.activation_checkpointing is True
    assert best["device_bytes"] < DEVICE_BYTES


def test_data_parallel_is_what_ddp_holds(small):
    assert small["precision"] == "bf16-mixed"
    assert small["data_parallel_bytes"] == pytest.approx(16 * small["parameters"], rel=0.001)
    assert small["full_checkpoint_bytes"] == pytest.approx(12 * small["parameters"], rel=0.001)


@pytest.mark.default_cases("llama_mini", "gpt_1b")
@pytest.mark.parametrize(
    "name", ["tiny", "llama_mini", "gpt_125m", "gpt_1b", "llama2_7b", "llama2_70b"]
)
def test_presets_have_the_parameters_of_the_example(name):
    model = composed(f"model={name}", "data.context=1024").model
    with torch.device("meta"):
        theirs = instantiate(model).gpt
    ours = source_from_arguments(Namespace(model=name, batch=1, context=1024, overrides=())).module
    assert [p.shape for p in ours.parameters()] == [p.shape for p in theirs.parameters()]


PUBLISHED = {
    "llama2_7b": 6.738e9, "llama2_13b": 13.016e9, "llama3_8b": 8.030e9, "llama3.1_405b": 405.9e9
}  # fmt: skip


@pytest.mark.default_cases("llama3_8b")
@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_published_number_of_parameters(name):
    with torch.device("meta"):
        counted = sum(p.numel() for p in Decoder(SHAPES[name]).parameters())
    assert counted == pytest.approx(PUBLISHED[name], rel=0.001)


HUGGING_FACE = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "vocab_size": 128,
}  # fmt: skip
KINDS = {  # with the number of parameters that transformers gives them
    "llama": ({"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}, 79_040),
    "mistral": ({"num_key_value_heads": 2, "head_dim": 24}, 90_432),
    "phi3": ({"pad_token_id": 0}, 86_336),
    "granite": ({}, 86_336),
    "qwen2": ({"num_key_value_heads": 4, "tie_word_embeddings": True}, 78_528),
    "qwen3": ({"num_key_value_heads": 2, "head_dim": 32}, 102_848),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_of_hugging_face_has_the_parameters_of_its_model(kind):
    more, numel = KINDS[kind]
    shape = shape_of_hugging_face({**HUGGING_FACE, **more, "model_type": kind})
    with torch.device("meta"):
        assert sum(p.numel() for p in Decoder(shape).parameters()) == numel


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_of_a_kind_are_those_of_transformers(kind, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    more, numel = KINDS[kind]
    config = AutoConfig.for_model(**{**HUGGING_FACE, **more, "model_type": kind})
    config.save_pretrained(tmp_path)
    ours = source_from_arguments(
        Namespace(model=str(tmp_path), batch=1, context=8, overrides=())
    ).module
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in theirs.parameters()) == numel
    assert sum(p.numel() for p in ours.parameters()) == numel


@pytest.mark.usefixtures("without_offload")
def test_a_model_is_a_config_of_hugging_face_or_a_folder_that_holds_it(capsys, tmp_path):
    path = tmp_path / "config.json"
    shape = {"model_type": "qwen3", "tie_word_embeddings": True, "num_hidden_layers": 1}
    path.write_text(json.dumps(HUGGING_FACE | shape))
    in_folder = plan(capsys, "--model", str(tmp_path), *OF_TWO)
    assert in_folder["model"] == f"{tmp_path}, batch 1 x 32 tokens"
    assert choice(in_folder, "stage3")["peak_bytes"]["activations"] > 0
    of_file, of_folder = (
        source_from_arguments(Namespace(model=str(one), batch=1, context=32, overrides=())).module
        for one in (path, tmp_path)
    )
    assert [p.shape for p in of_file.parameters()] == [p.shape for p in of_folder.parameters()]
    assert in_folder["parameters"] == sum(p.numel() for p in of_file.parameters())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "config.json: Expecting property name"),
        ("[]", "config.json: expected an object, got []"),
        ({"model_type": "bert"}, "one of llama, mistral, phi3, granite, qwen2, qwen3, got"),
        ({"model_type": None}, "got None; use --module with a class or function that builds"),
        ({"vocab_size": None}, "vocab_size must be an integer of at least 1, got None"),
        ({"vocab_size": 10**30}, "vocab_size must be at most 10000000, got 1000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000, got 1000000000"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide 4 heads, got 3"),
    ],
)
def test_a_config_without_a_known_shape_is_an_error(content, text, capsys, tmp_path):
    content = content if isinstance(content, str) else json.dumps(HUGGING_FACE | content)
    (tmp_path / "config.json").write_text(content)
    assert main(["plan", "--model", str(tmp_path), "--ranks", "2"]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.usefixtures("without_offload")
def test_a_class_is_built_with_its_arguments_and_traced_on_the_shapes_of_its_inputs(capsys):
    more = ["--arg", "width=16", "--input", "4x3x8x8", "--ranks", "2"]
    found = plan(capsys, "--module", VIT, *more)
    with torch.device("meta"):
        default, narrow = (
            sum(p.numel() for p in module.parameters()) for module in (ViT(), ViT(16))
        )
    assert found["parameters"] == narrow != default
    assert choice(found, "off")["peak_bytes"]["activations"] > 0


@pytest.mark.slow
def test_a_configuration_is_planned_with_its_overrides():
    """In a new process, in which no other code has registered the schemas with Hydra."""
    arguments = ["--config-name", "train", "trainer.devices=2", "data.context=16", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "lightning_zero.cli", "plan", *arguments, "precision=fp32"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "examples")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 2
    assert found["precision"] == "32-true"
    assert choice(found, "stage1")["peak_bytes"]["activations"] > 0
    with torch.device("meta"):
        shape = GPTConfig(width=128, num_layers=3, num_heads=4, is_llama=True, hidden=344)
        numel = sum(p.numel() for p in GPT(shape).parameters())
    assert found["parameters"] == numel


@pytest.mark.usefixtures("without_offload")
@pytest.mark.default_cases("{devices: 2, precision: 16}-16-mixed")
@pytest.mark.parametrize(
    ("trainer", "precision"),
    [("{devices: 2}", "32-true"), ("{devices: 2, precision: 16}", "16-mixed")],
)
def test_the_precision_of_a_configuration_is_that_of_its_trainer(
    tmp_path, capsys, trainer, precision
):
    text = "model: {_target_: torch.nn.Linear, in_features: 8, out_features: 8}\ntrainer: "
    (tmp_path / "own.yaml").write_text(text + trainer)
    found = plan(capsys, "--config-dir", str(tmp_path), "--config-name", "own")
    assert found["precision"] == precision


@pytest.mark.usefixtures("without_offload")
def test_float8_is_planned_with_its_layers_and_printed_with_its_plugin(tmp_path, capsys):
    pytest.importorskip("torchao", reason="needs torchao")
    assert run_plan(*SMALL, "--precision", "float8") == 0
    *_, trainer, overrides = capsys.readouterr().out.splitlines()
    assert trainer.endswith("plugins=Float8Precision())")
    assert "precision=float8" in overrides


@pytest.mark.usefixtures("without_offload")
def test_a_plugin_of_a_configuration_is_planned_and_printed_as_it_is(tmp_path, capsys):
    pytest.importorskip("torchao", reason="needs torchao")
    options = ["--config-dir", str(tmp_path), "--config-name", "own"]
    plugin = "_target_: lightning_zero.strategy.float8.Float8Precision, exclude: {}"
    own = "model: {{_target_: torch.nn.Linear, in_features: 16, out_features: 16}}\n"
    own += f"trainer: {{{{devices: 2, plugins: [{{{{{plugin}}}}}]}}}}"
    (tmp_path / "own.yaml").write_text(own.format("[Linear]"))
    with pytest.warns(UserWarning, match="converted no layer"):
        assert run_plan(*options) == 0
    heading, *_, trainer, overrides = capsys.readouterr().out.splitlines()
    assert "float8" in heading
    assert trainer.endswith('plugins=Float8Precision(exclude=["Linear"]))')
    assert "precision" not in overrides
    (tmp_path / "own.yaml").write_text(own.format("3"))
    assert main(["plan", *options]) == 2
    assert "trainer.plugins: exclude must be names" in capsys.readouterr().err


def test_float8_without_torchao_is_an_error_of_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    assert main(["plan", *SMALL, "--precision", "float8"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("lightning-zero plan: error: Float8Precision needs torchao: pip install")


def test_the_text_is_a_table_of_80_columns_and_two_lines_to_paste(capsys):
    assert run_plan(*SMALL, "--device-memory", "1GiB") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("two_blocks, batch 64 x 32 tokens")
    assert max(map(len, lines[:-2])) <= 80
    assert len([line for line in lines if line.endswith(" yes")]) < 13
    assert any(re.fullmatch(r"\d+ more choices: --all", line) for line in lines)
    trainer, overrides = lines[-2:]
    names = {"Trainer": pl.Trainer, "ZeroStrategy": ZeroStrategy}
    made = eval(trainer.replace('precision="bf16-mixed"', 'accelerator="cpu", logger=False'), names)
    config = composed(*overrides.split(), "trainer.accelerator=cpu").trainer
    assert instantiate(config.strategy).config == made.strategy.config
    assert config.devices == made.world_size == 2


def numbers_of(text):
    """Cells of the rows of the table, by stage and offload."""
    rows = [line.lstrip("*").split() for line in text.splitlines()]
    return {tuple(row[:2]): row[2:] for row in rows if row and re.match("off|stage\\d", row[0])}


def test_the_limit_changes_no_number_of_a_row(capsys):
    seen = []
    for limit in ("10MiB", "60MiB", None):
        status = run_plan(*SMALL, "--all", *limited(limit))
        assert status == 0
        seen.append(numbers_of(capsys.readouterr().out))
    verdicts = [{row.pop() for row in rows.values()} for rows in seen]
    assert "recompute" in verdicts[0]
    assert verdicts[1:] == [{"yes"}, {"yes"}]
    assert seen[0] == seen[1] == seen[2]
    for row in seen[0].values():
        assert float(row[2]) < float(row[1])  # with recompute, and the peak without


def limited(limit):
    return [] if limit is None else ["--device-memory", limit]


def test_the_heading_has_the_rate_between_ranks_and_the_memory_of_a_card(capsys):
    def heading(*more):
        assert run_plan(*SMALL, *more) == 0
        return " ".join(capsys.readouterr().out.partition("zero=")[0].split())

    of_card = heading("--device-memory", "80GB")
    assert "74.51 GiB per device" in of_card
    assert "25 GB/s between ranks, which is assumed" in of_card
    assert "80 GB are 74.51 GiB; a GPU that is sold with 80 GB has almost 80 GiB" in of_card
    given = heading("--device-memory", "79GiB", "--link-gb-per-s", "50")
    assert "50 GB/s between ranks DDP needs" in given
    assert "is sold" not in given


def test_with_a_limit_of_device_memory_auto_is_the_precision_of_a_gpu(tmp_path):
    """On a machine without a GPU, too."""
    parser = ArgumentParser()
    add_commands(parser.add_subparsers())

    def precision(trainer, *more):
        text = "model: {_target_: torch.nn.Linear, in_features: 8, out_features: 8}\ntrainer: "
        (tmp_path / "own.yaml").write_text(text + trainer)
        own = ["--config-dir", str(tmp_path), "--config-name", "own"]
        return source_from_arguments(parser.parse_args(["plan", *own, *more])).settings["precision"]

    auto = "{{accelerator: {}, precision: '${{zero.precision:${{.accelerator}}}}'}}"
    gpu = ["--device-memory", "80GiB"]
    for accelerator in ("auto", "'${zero.accelerator:}'", "cuda"):
        assert precision(auto.format(accelerator), *gpu) == "bf16-mixed"
    assert precision(auto.format("cpu"), *gpu) == "32-true"
    assert precision(auto.format("auto"), "--on-cpu") == (
        "bf16-mixed" if torch.cuda.is_available() else "32-true"
    )


@pytest.mark.slow
def test_the_sample_of_the_guide_is_the_output(capsys):
    page = (ROOT / "docs/guides/planner.md").read_text()
    command, sample = re.findall(r"```(?:bash|text)\n(.*?)```", page, flags=re.DOTALL)[:2]
    assert main(command.split()[1:]) == 0
    assert capsys.readouterr().out == sample


def test_all_choices_and_assumptions_are_printed_on_demand(capsys):
    more = ["--device-memory", "1GiB", "--memory-gb-per-s", "0.001", "--all"]
    assert run_plan(*SMALL, *more) == 0
    text = capsys.readouterr().out
    assert len([line for line in text.splitlines() if line.endswith(" yes")]) == 13
    legend = " ".join(text.split())
    assert "subtract them from --device-memory" in legend
    assert "3 GB/s of disk and 0.001 GB/s of CPU memory. Set other rates with" in legend
    assert "full checkpoint needs" in text
    assert max(map(len, text.splitlines()[:-2])) <= 80


def test_a_row_names_the_memory_that_is_too_small(capsys):
    limits = ["--device-memory", "604.2KiB", "--host-memory", "1MiB", "--all"]
    assert run_plan(*ADAFACTOR, *limits) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no: device" in text
    assert "host" in text
    assert "Ranks own full tensors and differ: the numbers are those of the rank with most." in text


def test_min_and_max_over_ranks_are_in_the_plan(capsys):
    one = choice(plan(capsys, *ADAFACTOR), "stage2")
    least, most = one["min_and_max_bytes_of_ranks"]["device"]
    assert least < most == rest(one, "device")
    assert one["average_bytes"] > 0


@pytest.mark.slow
def test_the_matrices_of_a_block_are_balanced_over_the_ranks(capsys):
    one = choice(plan(capsys, *SMALL, "--optimizer", "muon"), "stage2")
    least, most = one["min_and_max_bytes_of_ranks"]["device"]
    assert least == most


def test_the_status_is_1_where_nothing_fits_and_the_missing_bytes_are_printed(capsys):
    limits = ["--device-memory", "100KiB", "--host-memory", "1MiB"]
    assert run_plan(*ADAFACTOR, *limits) == 1
    text = capsys.readouterr().out
    assert "nothing fits; closest" in text
    assert "of device memory" in text


def test_a_plot_marks_the_cheapest_choice_and_draws_equal_bars_once(large_batch):
    assert large_batch.path.read_bytes().startswith(b"\x89PNG")
    (axes,) = large_batch.figure.axes
    (winner,) = [n for n in axes.get_yticklabels() if n.get_fontweight() == "bold"]
    assert winner.get_text() == large_batch.found["best"]["choice"]
    assert large_batch.found["best"]["checkpointing"]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert {"activations, checkpointed", "cheapest that fits"} <= set(labels)
    assert axes.get_xlabel().startswith("peak MiB per device")
    names = [label.get_text() for label in axes.get_yticklabels()]
    widths = zip(*([bar.get_width() for bar in bars] for bars in axes.containers), strict=True)
    stages = [names[round(bar.get_y())].split(",")[0] for bar in axes.containers[0]]
    bars = list(zip(stages, widths, strict=True))
    assert len(bars) == len(set(bars)) < len(names) == 13


def test_a_plot_without_matplotlib_is_an_error_that_names_the_package(capsys, monkeypatch):
    monkeypatch.setattr("lightning_zero.observe.plots.find_spec", lambda name: None)
    assert main(["plan", *SMALL, "--plot", "x.png"]) == 2
    assert 'pip install "lightning-zero[plot]"' in capsys.readouterr().err


def test_the_first_line_comes_before_torch_and_the_heading_before_the_estimates(
    capsys, monkeypatch
):
    def stop(*arguments):
        raise ValueError("no estimate")

    monkeypatch.setattr("lightning_zero.cli.plan._rows", stop)
    assert main(["plan", "--model", "tiny", *OF_TWO]) == 2
    seen = capsys.readouterr()
    assert seen.out.splitlines()[0].startswith("tiny, batch 1 x 32 tokens")
    assert seen.err.splitlines() == [
        "lightning-zero plan: loading torch and building the model",
        "lightning-zero plan: error: no estimate",
    ]


def test_no_device_is_touched_and_no_process_group_is_left(small):
    assert len(small["choices"]) == 13
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "llama9", "--ranks", "2"], "the model must be one of llama2_7b, "),
        ([*SMALL, "--devices", "2"], "unrecognized arguments: --devices"),
        ([*SMALL, "--device-memory", "24"], "24 has no unit; write 24GiB or 24GB"),
        ([*SMALL, "--disk", "much"], "got 'much'"),
        ([*SMALL, "--io-gb-per-s", "-1"], "expected GB per second such as 25, got '-1'"),
        (["--model", "tiny"], "expected the number of ranks"),
        (["--model", "tiny", "--ranks", "0"], "at least 1, got '0'"),
        (["--model", "tiny", "--ranks", "9"], "--ranks-per-node must divide 9 ranks, got 8"),
        ([*SMALL, "--optimizer", "adamwww"], "got 'adamwww'"),
        ([*SMALL, "zero=stage3"], "'zero=stage3' is an override of a Hydra configuration"),
        (
            ["--module", "tests.support.planned", "--ranks", "2"],
            "such as my.code:Model, got 'tests.support.planned'",
        ),
        (["--module", "no.such:A", "--ranks", "2"], "module no.such cannot be imported"),
        (
            ["--module", "tests.support.planned:A", "--ranks", "2"],
            "has no class A; it has: ViT, ConvNet, ",
        ),
        (
            ["--module", VIT, "--arg", "wide=3", "--ranks", "2"],
            "unexpected keyword argument 'wide'",
        ),
        (
            ["--module", VIT, "--input", "4,3", "--ranks", "2"],
            "--input must be a shape such as 8x3x224x224",
        ),
        (["--config-name", "nothing", "--ranks", "2"], "nothing"),
        (["--config-name", "train", "zero=stage9"], "stage9"),
        (["--ranks", "2"], "one of the arguments --model --module --config-name is required"),
        ([*SMALL, "--device-memory", "0GiB"], "expected at least one byte, got '0GiB'"),
        ([*SMALL, "--device-memory", "24GX"], "expected a size such as 24GiB"),
        ([*SMALL, "--batch", "0"], "expected an integer of at least 1, got '0'"),
        ([*SMALL, "--ranks-per-node", "3"], "--ranks-per-node must divide 2 ranks, got 3"),
        ([*SMALL, "--precision", "fp8"], "invalid choice: 'fp8'"),
        ([*SMALL, "--average", "gpu"], "invalid choice: 'gpu'"),
        ([*SMALL, "--optimizer", "lbfgs"], "states of LBFGS are unknown"),
        ([*SMALL, "--plot", "plan.docx"], "--plot plan.docx must end in one of"),
        ([*SMALL, "--plot", "no/such/folder/plan.png"], "directory no/such/folder does not exist"),
        (
            ["--module", VIT, "--optimizer", "muon", "--arg", "width=0", "--ranks", "2"],
            "cannot be built",
        ),
        (
            ["--module", "tests.support.planned:choices", "--ranks", "2"],
            "expected choices to be a torch.nn.Module, got list",
        ),
        (["--module", "tests.support.planned:ROOT", "--ranks", "2"], "has no class ROOT"),
        (["--module", "torch.nn:Identity", "--ranks", "2"], "has no parameter that requires"),
        (
            ["--module", VIT, "--arg", "width", "--ranks", "2"],
            "--arg must be NAME=VALUE, got 'width'",
        ),
        (["--module", VIT, "--input", "4x3:int9", "--ranks", "2"], "got '4x3:int9'"),
        (["--config-name", "train", "--config-dir", "no/such"], "no/such is not a directory"),
        (["--config-name", "train", "model=gpt_9"], "gpt_9"),
        (["--config-name", "train", "model.width=wide"], "model cannot be built"),
        (
            ["--config-name", "train", "model._target_=nowhere.Model"],
            "is installed?); add the directory of its code to PYTHONPATH.",
        ),
    ],
)
def test_bad_input_is_an_error_with_status_2(arguments, text, capsys):
    try:
        status = main(["plan", *arguments])
    except SystemExit as leave:
        status = leave.code
    assert status == 2
    assert text in " ".join(capsys.readouterr().err.split())


@pytest.mark.usefixtures("without_offload")
def test_inputs_of_a_wrong_shape_leave_activations_out_with_a_note(capsys):
    assert main(["plan", *LINEAR, "--input", "4x7", "--ranks", "2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "activations are not counted: one step of Linear cannot run on shapes alone" in text
    assert main(["plan", *LINEAR, "--ranks", "2"]) == 0
    assert "pass the shapes of the inputs with --input" in capsys.readouterr().out
