from tests.tools.words import uses_in, words_of

PROGRAM = '''"""Of one key."""

WholeBytes = 1  # Tells the user.


def rally_ranks():
    """Tells all ranks."""
'''


def test_identifiers_count_as_their_words():
    assert (
        words_of("self.WholeBytes = at_rest(HTTPServer2)")
        == "self whole bytes at rest http server 2"
    )


def test_each_use_is_found_with_its_line():
    found = [(use.term, use.line) for use in uses_in("lightning_zero/a.py", PROGRAM)]
    assert found == [
        ("headless genitive", 1),
        ("whole", 3),
        ("talk, told, hear", 3),
        ("rally", 6),
        ("talk, told, hear", 7),
        ("told, tells, says, hears in docstrings", 7),
    ]


def test_a_plain_file_has_none():
    assert not list(uses_in("docs/a.md", "Each rank keeps its shard of the optimizer states.\n"))
