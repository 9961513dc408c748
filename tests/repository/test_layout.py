"""Each test lies in the folder of the package whose behaviour it shows."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
PACKAGES = {path.parent.name for path in (TESTS.parent / "lightning_zero").glob("*/__init__.py")}
OTHERS = {"benchmarks", "gpu", "repository", "slurm", "streams", "support", "tools"}


def test_every_test_is_in_the_folder_of_a_package_or_of_one_of_few_other_subjects():
    assert not PACKAGES & OTHERS
    for path in TESTS.rglob("test_*.py"):
        folder, *rest = path.relative_to(TESTS).parts[:-1] or ("",)
        assert not rest, f"{path}: a folder holds no folders of tests"
        assert folder in PACKAGES | OTHERS, f"{path}: {folder} is no package of lightning_zero"
        assert (path.parent / "__init__.py").exists(), path


def test_modules_that_are_no_tests_are_in_the_folder_of_support():
    for path in TESTS.rglob("*.py"):
        folder = path.relative_to(TESTS).parts[0]
        is_test = path.name.startswith("test_") or path.name in ("__init__.py", "conftest.py")
        assert is_test or folder in OTHERS - {"repository"}, f"{path} belongs into tests/support"
