"""`lightning-zero trace RUN`, as a user runs it."""

import json

import pytest

from lightning_zero.cli import main
from lightning_zero.observe import plots as style
from lightning_zero.observe.recordings import CPU_TIMING_NOTE, write_recording
from tests.support.recordings import made_ranks


def run(*arguments):
    return main(["trace", *map(str, arguments)])


@pytest.fixture
def zero(tmp_path):
    """Directory `zero` of a run on 2 ranks, inside the directory of a logger."""
    folder = tmp_path / "run" / "csv" / "version_0" / "zero"
    for recording in made_ranks(2):
        write_recording(folder, recording)
    return folder


def test_a_run_becomes_a_trace_and_a_picture_beside_its_recordings(zero, tmp_path, capsys):
    assert run(tmp_path / "run") == 0
    trace = json.loads((zero / "trace_step_10.json").read_text())
    windows = [e["ts"] for e in trace["traceEvents"] if e.get("cat") == "window"]
    assert windows == [0.0, 0.0]
    assert (zero / "trace_step_10.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("step 10: ")
    assert printed[0].endswith(" ms, mean of 2 ranks")
    table = {line.split()[0]: line.split()[1:] for line in printed[2:7]}
    assert list(table) == ["forward", "backward", "step", "all_gather", "reduce_scatter"]
    mib, in_flight, overlapped, exposed, rate = map(float, table["all_gather"])
    assert mib == pytest.approx(8 * 4)
    assert in_flight == pytest.approx(overlapped + exposed, abs=0.02)
    assert rate == pytest.approx(mib * 2**20 / 1e9 / in_flight * 1e3, rel=0.01)
    waited = "rank 1 was last: the others waited 12.0 ms longer (7.3% of the step)"
    assert printed[8:10] == [CPU_TIMING_NOTE, waited]
    assert printed[10] == "prefetched: 14 of 16 units"
    assert printed[11:13] == [str(zero / "trace_step_10.json"), str(zero / "trace_step_10.png")]


@pytest.mark.default_cases("recordings")
@pytest.mark.parametrize("inside", [".", "recordings"])
def test_the_recordings_folder_and_an_output_folder_may_be_given(zero, tmp_path, inside):
    out = tmp_path / "new" / "out"
    assert run(zero / inside, "--step", 10, "--out", out) == 0
    names = sorted(path.name for path in out.iterdir())
    assert names == ["trace_step_10.json", "trace_step_10.png"]
    assert not list(zero.glob("trace*"))


def test_without_matplotlib_there_is_a_trace_and_an_install_hint(
    zero, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(style, "find_spec", lambda name: None)
    assert run(tmp_path / "run") == 0
    assert [path.name for path in zero.glob("trace*")] == ["trace_step_10.json"]
    line = 'no plot: plots need matplotlib: pip install "lightning-zero[plot]"'
    assert capsys.readouterr().out.splitlines()[-1] == line


def truncate(zero):
    path = zero / "recordings" / "step_10_rank_1.json"
    path.write_text(path.read_text()[:100])


def rename(zero):
    path = zero / "recordings" / "step_10_rank_1.json"
    path.write_text(path.read_text().replace('"spans"', '"events"'))


def mix(zero):
    write_recording(zero, made_ranks(3)[2])


def repeat(zero):
    write_recording(zero.parents[1] / "version_1" / "zero", made_ranks(2)[0])


def lose(zero):
    (zero / "recordings" / "step_10_rank_0.json").unlink()


def empty(zero):
    lose(zero)
    (zero / "recordings" / "step_10_rank_1.json").unlink()


@pytest.mark.parametrize(
    ("harm", "arguments", "text"),
    [
        (None, ["nothing"], "nothing is not a directory; pass the directory of a run."),
        (empty, ["run"], "run has no zero/recordings; record steps with the callback Zero"),
        (None, ["run", "--step", "9"], "recordings has no step 9; recorded steps: 10."),
        (None, ["run", "--step", "x"], "invalid int value: 'x'"),
        (lose, ["run"], "step_10_rank_0.json does not exist (missing ranks: 0)"),
        (truncate, ["run"], "step_10_rank_1.json is not JSON ("),
        (rename, ["run"], "step_10_rank_1.json is not a recording of this version: expected the"),
        (mix, ["run"], "has step 10 of runs on 2 and 3 ranks; delete the files of the older"),
        (
            repeat,
            ["run"],
            "run has recordings of 2 runs; pass one of them: run/csv/version_0/zero, ",
        ),
        (None, ["run", "--out", "file"], "File exists"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    harm, arguments, text, zero, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    if harm is not None:
        harm(zero)
    try:
        status = run(*arguments)
    except SystemExit as error:
        status = error.code
    assert status == 2
    printed = capsys.readouterr()
    assert text in printed.err
    assert not printed.out
    assert not list(tmp_path.rglob("trace_step*"))
