"""The command that draws the picture of the first page."""

import pytest

from tests.benchmarks import memory_by_stage


@pytest.mark.slow
def test_what_is_measured_is_what_is_reported_and_the_formula(tmp_path, capsys):
    picture = tmp_path / "a.png"
    words = f"--ranks 2 --size 2m --precision fp32 --picture {picture}"
    found = memory_by_stage.main(words.split())
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "stage 3, rank 1" in capsys.readouterr().out
    formulas = memory_by_stage.formulas("2m", "fp32", 2)
    for stage, by_rank in found.items():
        for measured in by_rank:
            assert measured.live == sum(measured.states.values())
            for state, nbytes in formulas[stage].items():
                assert measured.states[state] == pytest.approx(nbytes, rel=0.01), (stage, state)
