"""Lines of progress, and which messages reach the terminal."""

import contextlib
import io
import logging
import re
import warnings

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_zero.callbacks import ProgressLines
from lightning_zero.launch import hydra as launch_hydra
from lightning_zero.launch.hydra import RecordsOfPackage
from tests.support.fitting import make_trainer
from tests.support.warm import run_ranks


class Logging(BoringModel):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/one", 1.0, prog_bar=True)


def _fit(rank, world_size):
    printed = io.StringIO()
    trainer = make_trainer(
        "zero2",
        callbacks=[ProgressLines(refresh_rate=2)],
        enable_progress_bar=True,
        max_steps=4,
        limit_val_batches=1,
        val_check_interval=4,
    )
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        trainer.fit(Logging())
    return printed.getvalue(), [str(warning.message) for warning in caught]


def test_progress_is_lines_of_rank_0_without_control_characters():
    texts, caught = zip(*run_ranks(2, _fit, has_group=False), strict=True)
    first, second, validation = texts[0].splitlines()
    assert re.fullmatch(r"step 2 of 4, \S+ steps/s: train/loss \S+", first)
    assert re.fullmatch(r"step 4 of 4, \S+ steps/s: train/loss \S+", second)
    assert re.fullmatch(r"validation at step 4: train/loss \S+, val/one 1", validation)
    assert not re.search(r"[\r\x1b]", texts[0])
    assert texts[1] == ""
    assert any("sync_dist" in text for text in caught[0])


def test_one_process_is_not_advised_to_sync_its_metrics():
    ((_, caught),) = run_ranks(1, _fit, has_group=False)
    assert not any("sync_dist" in text for text in caught)


@pytest.mark.parametrize(("path", "passes"), [(launch_hydra.__file__, True), (__file__, False)])
def test_only_messages_of_the_package_pass_to_the_terminal(path, passes):
    record = logging.LogRecord("lightning.pytorch", logging.INFO, path, 1, "text", (), None)
    assert RecordsOfPackage().filter(record) is passes
