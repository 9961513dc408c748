"""Read a DeepSpeed configuration, so that a DeepSpeed user's file gives the same training.

`translate` turns a file (or a dict) into a `ZeroConfig`, arguments for the Trainer, and the
optimizer and scheduler sections as data. What would change the training and is not available here
is a `ValueError`; what has no meaning here is named in `Translation.ignored`. Imports layout alone.

    translate   the file as settings of ours
    optimizer   its optimizer and scheduler sections, built
    file        its sections, and what becomes of every key that DeepSpeed knows

Begin with `translate`.

[Note: where the file is silent] What decides the result follows DeepSpeed (stage 0, float32, a
dynamic loss scale from 2**16 with a window of 1000, AdamW logic for "Adam"); what decides speed
alone follows `ZeroConfig`. Two departures:

- Gradients are summed in float32 unless communication_data_type or grad_accum_dtype lowers it.
  DeepSpeed sums in the dtype of training.
- DeepSpeed does not clip gradients before 0.19.3 and clips at 1.0 since. Here, as in Lightning's
  own DeepSpeedStrategy, a silent file leaves it to `Trainer(gradient_clip_val=...)`, and a warning
  says so.
"""

from lightning_zero.deepspeed.optimizer import build_optimizer, build_scheduler
from lightning_zero.deepspeed.translate import Translation, translate

__all__ = ["Translation", "build_optimizer", "build_scheduler", "translate"]
