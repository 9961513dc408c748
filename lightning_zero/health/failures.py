"""Failures of ranks, and the errors that tell of them."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass

import torch.distributed as dist

__all__ = [
    "DESYNC_HINT",
    "DesynchronizedError",
    "DeadlockError",
    "PeerFailedError",
    "RankFailure",
    "desync_error",
    "is_transport_error",
    "may_be_transport_error",
    "print_now",
    "silence_error",
    "summary",
]

DESYNC_HINT = (  # a line of errors about desynchronized ranks
    "To read parameters on some ranks only, enter `with lightning_zero.gathered(module):` on every "
    "rank; to run forwards without gradients on some ranks only, enter "
    "`with lightning_zero.uneven_calls(module):` on every rank."
)


_COLLECTIVES = ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py")


class DesynchronizedError(RuntimeError):
    """The ranks are desynchronized: they issued different operations, or one of them failed."""


class PeerFailedError(DesynchronizedError):
    """Another rank raised an exception or has died; the text names the rank and the cause."""


class DeadlockError(DesynchronizedError):
    """All ranks wait for each other, in different places; the text states what each does."""


@dataclass(frozen=True)
class RankFailure:
    """Reason why the ranks cannot continue together."""

    rank: int | None  # rank that caused the failure; None: no single rank
    text: str  # clause with its subject, such as "rank 1 was killed by SIGKILL"

    def explain_to(self, rank: int) -> str:
        """Sentence about what this failure means for `rank`."""
        if self.rank == rank:
            return f"rank {rank} has already failed: {self.text}"
        return f"rank {rank} stops because {self.text}"


def desync_error(rank: int, name: str, error: Exception) -> DesynchronizedError:
    """The error of `rank`, whose wait for `name` ended with `error` though no rank has failed."""
    return DesynchronizedError(
        f"rank {rank} waited for {name} without success ({summary(error)}): the call itself is "
        "wrong, or the other ranks did not reach the same point. Every rank must run forward and "
        "backward together, with equally many batches. In stage 3 this includes a forward that "
        f"generates a sample or an image: it must not run under `if rank == 0`.\n{DESYNC_HINT}"
    )


def silence_error(rank: int, name: str, error: Exception) -> DesynchronizedError:
    """As `desync_error`, where rank 0, which would know of a failure, does not answer."""
    return DesynchronizedError(
        f"rank {rank} waited for {name} without success ({summary(error)}), and rank 0, through "
        "which ranks learn of each other's failures, does not answer: its process is stopped, or "
        "busy in a call that keeps Python's lock. So the cause is not known here."
    )


def may_be_transport_error(error: BaseException) -> bool:
    """Whether torch may have raised the error because another rank is gone or does not answer.

    gloo's errors have no type of their own.
    """
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def is_transport_error(error: BaseException) -> bool:
    """As `may_be_transport_error`, for an error that was raised anywhere in the program."""
    if isinstance(error, dist.DistError):
        return True
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    paths = (frame.f_code.co_filename for frame in frames)
    return type(error) is RuntimeError and any(map(_is_of_collectives, paths))


def _is_of_collectives(path: str) -> bool:
    folder, file = os.path.split(path)
    return folder == os.path.dirname(dist.__file__) and file in _COLLECTIVES


def summary(error: BaseException) -> str:
    """Returns the type and the first line of an exception."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return f"{type(error).__name__}: {lines[0][:500]}"


def print_now(text: str) -> None:
    """Prints at once, because this process may end next."""
    print(f"lightning_zero: {text}", file=sys.stderr, flush=True)
