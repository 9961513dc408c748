"""The installed wheel, used by an application outside this repository."""

import os
import re
import site
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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

# An application with a trainer, loggers and callbacks at the usual places. It prints the objects
# that it has built for every choice of every group of the wheel.
FULL_APP = """
defaults:
  - _self_
  - paths: default
  - zero: stage3
  - sharding: world
  - bucket: default
  - overlap: comm
  - offload: none
  - trainer: cpu
  - precision: fp32
  - logger: csv
  - callbacks: default
  - debug: null

optimized_metric: val/acc
task_name: mine

hydra:
  searchpath: [pkg://lightning_zero.conf]
"""
BUILD_ALL = """
import pathlib
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict
import lightning_zero.conf
from lightning_zero.conf import make_trainer

here = pathlib.Path.cwd()
conf = pathlib.Path(lightning_zero.conf.__file__).parent
has_group = lambda group: f"- {group}:" in (here / "full.yaml").read_text()
for path in sorted(conf.glob("*/**/*.yaml")):
    group = path.parent.relative_to(conf).as_posix()
    word = f"{'' if has_group(group) or '/' in group else '+'}{group}={path.stem}"
    words = [word, "trainer.accelerator=cpu", "trainer.devices=1", "trainer.num_nodes=1"]
    with initialize_config_dir(version_base="1.3", config_dir=str(here)):
        try:
            config = compose("full", overrides=words, return_hydra_config=True)
            with open_dict(config):
                config.hydra.runtime.output_dir = str(here / "run")
            HydraConfig.instance().set_config(config)
            with open_dict(config):
                del config["hydra"]
            print(word, "gives", type(make_trainer(config).strategy).__name__)
        except Exception as error:
            print(word, "FAILS", repr(error)[:500], repr(error.__cause__)[:500])
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder with the sdist, and the wheel that is built from it."""
    pytest.importorskip("build", reason="needs the extra dev")
    folder = tmp_path_factory.mktemp("packages")
    # From a copy of the tracked files, as a release is.
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("needs the repository's git, to know what belongs to it")
    source = folder / "source"
    subprocess.run(["git", "checkout-index", "--all", f"--prefix={source}/"], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, source], check=True)
    return folder


@pytest.fixture(scope="module")
def installed(packages, tmp_path_factory):
    """Python of an environment with the wheel, and the folder of an application beside it."""
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = packages.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    (site_packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)
    # Dependencies come from this environment, after the wheel.
    (site_packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    app = folder / "app"
    app.mkdir()
    (app / "app.py").write_text(APP)
    (app / "build_all.py").write_text(BUILD_ALL)
    (app / "full.yaml").write_text(FULL_APP)
    blocks = re.findall(r"^```yaml\n(.*?)^```$", GUIDE, flags=re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "my_trainer" in block]
    (app / "app.yaml").write_text(block)
    return python, app


def run(installed, *words, script="app.py", **variables):
    python, app = installed
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    done = subprocess.run(
        [python, script, *words], cwd=app, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_package_index_takes_the_sdist_and_the_wheel(packages):
    files = [*packages.glob("*.tar.gz"), *packages.glob("*.whl")]
    assert len(files) == 2
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)


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
    assert "Key 'stag' not in 'ZeroStrategySettings (--cfg job shows all;" in printed


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


@pytest.mark.slow
def test_the_wheel_has_no_file_that_needs_the_examples(installed):
    python, _ = installed
    (conf,) = python.parents[1].glob("lib/python*/site-packages/lightning_zero/conf")
    shipped = {path.relative_to(conf).as_posix() for path in conf.rglob("*.yaml")}
    here = {path.relative_to(ROOT / "conf").as_posix() for path in (ROOT / "conf").rglob("*.yaml")}
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    for path in shipped:
        assert not re.search(rf"_target_: ({'|'.join(names)})\\.", (conf / path).read_text()), path
    left = {path.split("/")[0] for path in here - shipped}
    assert left == {
        "train.yaml",
        "eval.yaml",
        "data",
        "experiment",
        "hparams_search",
        "model",
        "optimizer",
    }


@pytest.mark.slow
def test_every_choice_of_the_wheel_builds_a_trainer(installed):
    code, printed = run(installed, script="build_all.py")
    assert code == 0, printed
    built = dict(re.findall(r"^(\S+) (gives .*|FAILS .*)$", printed, flags=re.MULTILINE))
    needs = {"logger=tensorboard": "tensorboard", "logger=many_loggers": "tensorboard"}
    for word, result in built.items():
        if word in needs and find_spec(needs[word]) is None:
            assert 'pip install "lightning-zero[tensorboard]"' in result
        elif word == "trainer=ddp":
            assert result == "gives DDPStrategy"
        else:
            assert result == "gives ZeroStrategy", word
    assert {"zero=stage1", "debug=fdr", "hydra/launcher=slurm", "callbacks=batch"} <= set(built)
