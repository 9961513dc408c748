"""The command `lightning-zero`: one module for each subcommand, imported when it is to run.

May import every room; no room imports it. `options` says what may be typed, without torch, so that
`--help` and mistakes are answered at once. `plan_result` shows what `plan` has found; `rates` are
files of what was measured.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import sys
from collections.abc import Sequence

from lightning_zero._version import __version__
from lightning_zero.cli.options import add_commands
from lightning_zero.layout.foreign_names import escaped

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: Without the program's name. None: the process's own.

    Returns:
        0; 1 where something was found to be wrong; 2 where the command could not be carried out.

    Raises:
        SystemExit: Of 2 for options that argparse refuses, of 0 after `--help`.
    """
    parser = argparse.ArgumentParser(
        "lightning-zero",
        description="Plans jobs, shows what a step did, looks at and converts checkpoints, and "
        "measures disks and links.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    add_commands(parser.add_subparsers(required=True, metavar="COMMAND", dest="command"))
    args, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest  # argparse wants all of them in one place
    try:
        module = importlib.import_module(f"{__name__}.{args.command.replace('-', '_')}")
        status: int = module.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # `lightning-zero inspect x | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted; nothing was changed", file=sys.stderr)
        return 130
    except pickle.UnpicklingError as error:
        return _fail(
            args.command,
            f"{args.checkpoint} holds classes that are not known to be safe "
            f"({_one_line(error)[:200]}); if you trust where it comes from, use --trust.",
        )
    except (ImportError, OSError, ValueError, RuntimeError, NotImplementedError) as error:
        return _fail(args.command, _one_line(error))
    except Exception as error:
        addresses = [
            text for text in vars(args).values() if isinstance(text, str) and "://" in text
        ]
        if not addresses:
            raise
        # Packages for remote storage raise what they like: botocore's are Exceptions.
        return _fail(args.command, f"{', '.join(addresses)}: {_one_line(error)}")
    return status


def _fail(command: str, text: str) -> int:
    print(f"lightning-zero {command}: error: {text}", file=sys.stderr)
    return 2


def _one_line(error: Exception) -> str:
    """Its text, with an escape for what a terminal would obey: it may hold names of a file."""
    return escaped(" ".join(str(error).split())) or type(error).__name__
