"""What `pip install lightning-zero` gives to an application outside this repository."""

import os
import re
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "guides" / "hydra.md").read_text()
APP = """
import hydra
from hydra.utils import instantiate

@hydra.main(version_base="1.3", config_path=".", config_name="app")
def main(config):
    trainer = instantiate(config.my_trainer)
    import lightning_zero
    print(lightning_zero.__file__)
    print(type(trainer.strategy).__name__, trainer.strategy.config)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Python of an environment with the wheel, and the folder of an application beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    # Built from a copy of what git knows, as a release is.
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("needs the repository's git, to know what belongs to it")
    source = folder / "source"
    subprocess.run(["git", "checkout-index", "--all", f"--prefix={source}/"], cwd=ROOT, check=True)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", f"--wheel-dir={folder}", source], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # The dependencies are those of this environment, behind the wheel.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    app = folder / "app"
    app.mkdir()
    (app / "app.py").write_text(APP)
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", GUIDE, flags=re.DOTALL | re.MULTILINE)
    (app / "app.yaml").write_text(block)
    return python, app


def run(installed, *words, **variables):
    python, app = installed
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    done = subprocess.run(
        [python, "app.py", *words], cwd=app, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_groups_of_the_wheel_serve_another_application(installed):
    code, printed = run(installed)
    assert code == 0, printed
    assert "venv/lib" in printed
    assert "ZeroStrategy ZeroConfig(stage=2, reduce_bucket_size=67108864" in printed
    code, printed = run(installed, "zero@my_trainer.strategy=stage3")
    assert "ZeroConfig(stage=3" in printed
    code, printed = run(installed, "my_trainer.strategy.stag=1")
    assert code == 1
    assert "Key 'stag' not in 'ZeroStrategySettings (--cfg job shows all)'" in printed


@pytest.mark.slow
def test_the_settings_are_shown_and_completed(installed):
    code, printed = run(installed, "--cfg", "job")
    assert code == 0, printed
    assert "reshard_after_forward: null" in printed
    for line, completed in (
        ("python app.py bucket=", "bucket=small"),
        ("python app.py my_trainer.strategy.overl", "my_trainer.strategy.overlap_comm="),
    ):
        asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_CWORD": "2"}
        code, printed = run(installed, "-sc", "query=bash", **asked)
        assert completed in printed.split(), printed
