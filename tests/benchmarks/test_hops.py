"""A step takes no more calls, and a collective passes no more files, than they have come to."""

from tests.benchmarks.hops import measure
from tests.support.ranks import run_ranks


def test_a_step_takes_no_more_calls_and_files():
    profile = run_ranks(2, measure)[0]
    assert profile.calls.total() <= 4060
    assert max(map(len, profile.files_by_span["unshard"])) <= 15
    assert max(map(len, profile.files_by_span["gradient"])) <= 20
