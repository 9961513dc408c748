"""Counts words that the project does not use, and sentences without a subject.

    python -m tests.tools.words  # every file; exit code 1 if a word is left
    python -m tests.tools.words lightning_zero/comm --show
    python -m tests.tools.words --revision HEAD~20  # the same count of an earlier commit

The words are those for which the field has another one (`TERMS`, with what to write instead). An
identifier counts as its words: `WholeBytes` and `whole_bytes` both hold "whole". A use that has to
stay stands in `ALLOWED`, with the reason.
"""

import argparse
import fnmatch
import io
import re
import subprocess
import sys
import tarfile
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = ("/run", ".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".sbatch")
FOLDERS = ("", ".ci", "conf", "docs", "examples", "lightning_zero", "tests")
# History and this table keep their words.
SKIPPED = ("CHANGELOG.md", "tests/benchmarks/20*.md", "tests/tools/*words.py")


@dataclass(frozen=True)
class Term:
    """A word that is not used, and what is written instead.

    `pattern` is matched against the words of a line, in lower case and separated by single spaces;
    with `is_exact` against the line as it is written.
    """

    name: str
    pattern: str
    instead: str
    is_exact: bool = False
    only: str = "*"  # files
    prose_only: bool = False  # documents, docstrings and comments, not code


TERMS = (
    Term(
        "PARAM, GRAD, OPTIM",
        r"\b(PARAM|GRAD|OPTIM)\b",
        "parameter, gradient, optimizer state",
        is_exact=True,
        prose_only=True,
    ),
    Term("whole", r"\bwholes?\b", "unsharded, full, entire"),
    Term("apart", r"\bapart\b", "sharded, separate, different"),
    Term(
        "at rest",
        r"\b(at rest|rest at|come to rest|comes to rest|rests|resting)\b",
        "sharded, between steps, stored",
    ),
    Term("gather ahead", r"\bgathers? ahead\b", "prefetch"),
    Term("finish gather", r"\bfinish gather\b", "wait_for_unshard"),
    Term("make whole", r"\bmakes? (it |them )?whole\b", "unshard"),
    Term("travels", r"\btravel(s|led|ling)?\b", "is sent"),
    Term(
        "goes (a collective)",
        r"\b(gather|reduction|collective|vote|round)s? go(es)?\b",
        "is issued, is sent",
    ),
    Term(
        "before_forward, leave, turn",
        r"\.(turn|has_turned|before_backward_of|after_backward_of)\b|\bdef (leave|turn)\b",
        "pre_forward, reshard, begin_backward",
        is_exact=True,
        only="*.py",
    ),
    Term("follower", r"\bfollowers?\b", "param_shard"),
    Term(
        "stepped, shown, accept (tensors)",
        r"\.(stepped|shown|accept)\b(?!\()|\bdef (stepped|shown|accept)\b",
        "main parameter, view",
        is_exact=True,
        only="lightning_zero/*",
    ),
    Term(
        "point_at_rest, look_at_rest",
        r"\b(point at rest|point back|look at rest)\b",
        "sharded parameter view",
    ),
    Term("in vain", r"\bin vain\b", "unused, without success"),
    Term("groups along the axes", r"\bgroups along (the )?axes\b", "shard group, replica group"),
    Term("elsewhere", r"\belsewhere\b", "offloaded, in other places"),
    Term("dear", r"\bdear(er|est)?\b", "expensive"),
    Term(
        "talk, told, hear",
        r"\b(talk|talks|talking|told|tells|hear|hears|heard|hearing)\b",
        "send, receive, report, log, return",
    ),
    Term("says", r"\b(says|saying|sayings)\b", "states, reports, contains, a vote"),
    Term(
        "Said, Voice, Learned",
        r"\b(Said|Heard|Voice|Learned|Findings|Roll|Doing|Wish|Talk)\b(?![ ,])",
        "Vote, RoundResult, RoundClient, RecordedSchedules, ...",
        is_exact=True,
        only="*.py",
    ),
    Term("foretell", r"\bforet(ell|ells|old|elling)\b", "predict"),
    Term("plan of a pass", r"\bplans? of a pass\b", "recorded schedule"),
    Term("astray", r"\bastray\b", "desynchronized"),
    Term("alike", r"\balike\b", "equal, consistent, the same"),
    Term("facts", r"\bfacts?\b", "consistency check, description"),
    Term(
        "cut",
        r"\b(cut|cuts|cutting|uncut)\b",
        "shard, split, bucketize, split_sizes, disconnect, end_window",
    ),
    Term("rally", r"\brall(y|ies|ied|ying)\b", "regroup"),
    Term("give up", r"\b(give|gives|giving|gave|given) up\b", "abort"),
    Term("news, peers' ends", r"\b(news|peers ends)\b", "status, failure report"),
    Term("wish", r"\bwish(es|ed)?\b", "stop request"),
    Term("the place is taken away", r"\bplace is taken\b", "the job is preempted"),
    Term(
        "trial, toy, findings, examine",
        r"\b(trial|trials|toy|toys|findings|examine[sd]?|examining)\b",
        "probe, ProbeResult",
    ),
    Term("absorb", r"\babsorb(s|ed|ing)?\b", "sync_writes"),
    Term("take_rewritten", r"\btake rewritten\b", "detect_writes"),
    Term(
        "give back, take over, born with",
        r"\b(give|gives|given|gave|giving) back\b|\b(take|takes|took|taken|taking) over\b|\bborn\b",
        "unwrap, wrap, created",
    ),
    Term(
        "Place, form (checkpoint)",
        r"\bPlace\b|\b[Cc]heckpoint_?[Ff]orm\b|\b(full|sharded) form\b",
        "CheckpointPath, full checkpoint, sharded checkpoint",
        is_exact=True,
    ),
    Term("told apart", r"\btold apart\b", "separated"),
    Term(
        "nobody, somebody, whoever",
        r"\b(nobody|somebody|whoever|everybody|anybody)\b",
        "a rank, a thread, the user, the caller",
    ),
    Term(
        "room, floor, house, neighbour",
        r"\b(rooms?|house|floors?|neighbours?)\b",
        "package, module, layer, space",
    ),
    Term("for ever", r"\bfor ever\b", "hangs, without limit"),
    Term("heeded", r"\bheed(s|ed)?\b", "obeyed, take effect"),
)
HEADLESS = re.compile(r'("""|^\s*(#+ )?|: |\. |\| )Of (?!course\b)[a-z0-9`]')
REPORTING = re.compile(r"\b(told|tells|says|hears)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Allowed:
    """A use that stays: the part of a line that holds it, as a regular expression, and why."""

    term: str
    part: str
    reason: str
    files: str = "*"


ALLOWED = (
    Allowed("room, floor, house, neighbour", r"floor_?div(ide)?|\bfloor_?\b\(", "torch's name"),
    Allowed(
        "trial, toy, findings, examine",
        r"n_trials|in_each_trial|n_startup_trials|trials;|(max|per)_trials?",
        "name in Optuna or Lightning",
    ),
    Allowed("facts", "EmoFact", "name of an optimizer"),
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


@dataclass(frozen=True)
class Use:
    """One use of a term: its file, line number and text."""

    term: str
    path: str
    line: int
    text: str


def words_of(line: str) -> str:
    """The words of a line in lower case, identifiers split, separated by single spaces."""
    return " ".join(_WORD.findall(line)).lower()


def prose_lines(source: str) -> dict[int, bool]:
    """Line numbers of comments and docstrings of a Python source; True: of a docstring."""
    lines: dict[int, bool] = {}
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0]] = False
        elif token.type == tokenize.STRING and before in (
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
        ):
            lines.update(dict.fromkeys(range(token.start[0], token.end[0] + 1), True))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return lines


def _without_allowed(term: str, path: str, line: str) -> str:
    for allowed in ALLOWED:
        if allowed.term == term and fnmatch.fnmatch(path, allowed.files):
            line = re.sub(allowed.part, "", line)
    return line


def uses_in(path: str, text: str) -> Iterator[Use]:
    """Every use of a term, headless genitive and reporting verb in one file."""
    prose = prose_lines(text) if path.endswith(".py") else None
    terms = [term for term in TERMS if fnmatch.fnmatch(path, term.only)]
    for number, line in enumerate(text.splitlines(), start=1):
        words = words_of(line)
        for term in terms:
            if term.prose_only and prose is not None and number not in prose:
                continue
            if re.search(term.pattern, line if term.is_exact else words):
                kept = _without_allowed(term.name, path, line)
                for _ in re.finditer(term.pattern, kept if term.is_exact else words_of(kept)):
                    yield Use(term.name, path, number, line.strip())
        if HEADLESS.search(line):
            yield Use("headless genitive", path, number, line.strip())
        if prose is not None and prose.get(number) and REPORTING.search(line):
            yield Use("told, tells, says, hears in docstrings", path, number, line.strip())


def _is_read(path: str) -> bool:
    return path.endswith(SUFFIXES) and not any(fnmatch.fnmatch(path, p) for p in SKIPPED)


def files_of(revision: str | None) -> Iterator[tuple[str, str]]:
    """Path and text of each file that is read, of the working tree or of a revision."""
    if revision is None:
        for folder in FOLDERS:
            pattern = "**/*" if folder else "*"
            for file in sorted((ROOT / folder).glob(pattern)):
                path = file.relative_to(ROOT).as_posix()
                if _is_read(path) and file.is_file() and "/." not in path:
                    yield path, file.read_text(encoding="utf-8")
        return
    archive = subprocess.run(
        ["git", "archive", revision], cwd=ROOT, capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        for member in files:
            file = files.extractfile(member) if _is_read(member.name) else None
            if file is not None:
                yield member.name, file.read().decode()


def _column(path: str) -> int:
    folders = ("lightning_zero/", "tests/")
    return next((n for n, folder in enumerate(folders) if path.startswith(folder)), len(folders))


def table(uses: Iterable[Use]) -> list[str]:
    """Rows of a term and its uses in the package, in tests and in other files, by frequency."""
    counts: dict[str, list[int]] = {}
    for use in uses:
        counts.setdefault(use.term, [0, 0, 0])[_column(use.path)] += 1
    rows = sorted(counts.items(), key=lambda item: -sum(item[1]))
    rows.append(("total", [sum(row[i] for _, row in rows) for i in range(3)]))
    return [f"{'term':<42} package tests  other"] + [
        f"{term:<42} {row[0]:7} {row[1]:5} {row[2]:6}" for term, row in rows
    ]


def main(arguments: list[str] | None = None) -> int:
    """Prints the count; 1 if any use is left."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.words",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", help="only files under these paths")
    parser.add_argument("--show", action="store_true", help="print every use, with its line")
    parser.add_argument("--revision", help="count in this commit instead of the working tree")
    chosen = parser.parse_args(arguments)
    uses = [
        use
        for path, text in files_of(chosen.revision)
        if not chosen.paths or any(path.startswith(start) for start in chosen.paths)
        for use in uses_in(path, text)
    ]
    instead = {term.name: term.instead for term in TERMS}
    if chosen.show:
        for use in uses:
            print(f"{use.path}:{use.line}: {use.term}: {use.text}")
            if use.term in instead:
                print(f"    write: {instead[use.term]}")
    print("\n".join(table(uses)))
    return int(bool(uses))


if __name__ == "__main__":
    sys.exit(main())
