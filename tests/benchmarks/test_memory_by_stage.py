"""The command that draws the picture of the first page."""

import pytest

from tests.benchmarks import memory_by_stage


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "size", "ranks", "tolerance"),
    [
        ("fp32", "2m", 2, 0.01),
        pytest.param("fp32", "25m", 4, 0.001, marks=pytest.mark.slow),
        pytest.param("bf16", "25m", 4, 0.001, marks=pytest.mark.slow),
    ],
)
def test_what_is_measured_is_what_is_reported_and_the_formula(
    precision, size, ranks, tolerance, tmp_path, capsys
):
    picture = tmp_path / "a.png"
    words = f"--ranks {ranks} --size {size} --precision {precision} --picture {picture}"
    found = memory_by_stage.main(words.split())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "stage 3, rank 1" in capsys.readouterr().out
    formulas = memory_by_stage.formulas(size, precision, ranks)
    for stage, measured in found.items():
        for one in measured:
            assert one.live == sum(one.states.values())
            for state, nbytes in formulas[stage].items():
                assert one.states[state] == pytest.approx(nbytes, rel=tolerance), (stage, state)


@pytest.mark.parametrize(
    ("stage", "words"), [(0, "16"), (1, "8 + 8/N"), (2, "4 + 12/N"), (3, "16/N")]
)
def test_the_formula_in_words(stage, words):
    assert memory_by_stage.in_words(stage, "fp32") == words
