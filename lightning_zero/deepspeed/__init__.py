"""DeepSpeed's formats: a configuration gives the same training here, a checkpoint is opened.

Imports layout and tensors. `translate` turns a file (or a dict) into a `ZeroConfig` and arguments
for the Trainer. A setting that would change the training and is not supported is a `ValueError`;
every other key that is not translated is in `Translation.ignored`.

    translate   a table of the keys that are translated, one of those that are refused
    optimizer   refuses its optimizer and scheduler sections, with the same lines in torch
    checkpoint  opens checkpoint directories as full tensors by name

Begin with `translate`.

[Note: defaults] Where the file has no setting, stage and precision follow DeepSpeed (stage 0,
float32); all others follow `ZeroConfig` and Lightning. So

- gradients are summed in float32 unless communication_data_type or grad_accum_dtype lowers it;
  DeepSpeed sums in the dtype of training;
- before 0.19.3 DeepSpeed does not clip gradients; since then it clips at 1.0. Here, as in
  Lightning's own DeepSpeedStrategy, `Trainer(gradient_clip_val=...)` decides if the file has no
  setting, and a warning is logged.
"""

from lightning_zero.deepspeed.translate import Translation, translate

__all__ = ["Translation", "translate"]
