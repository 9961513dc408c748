"""The command `lightning-zero`: one module for each subcommand, imported when it runs.

May import every package; no package imports it. `options` declares all arguments without torch, so
that `--help` and usage errors take no time. `plan_result` prints the result of `plan`.
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
        argv: Arguments without the program's name. None: those of the process.

    Returns:
        Exit status: 0; 1 if the result is negative (a damaged checkpoint, a job that does not
        fit); 2 if the command failed.

    Raises:
        SystemExit: 2 for arguments that argparse rejects, 0 after `--help`.
    """
    parser = argparse.ArgumentParser(
        "lightning-zero",
        description="Tries machines, plans jobs, compares runs, shows traces of steps and results "
        "of sweeps, inspects and exports checkpoints.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    add_commands(parser.add_subparsers(metavar="COMMAND", dest="command"))
    args, rest = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest  # argparse collects only adjacent overrides
    try:
        if first_line := getattr(args, "first_line", ""):  # before imports that take seconds
            print(f"lightning-zero {args.command}: {first_line}", file=sys.stderr, flush=True)
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
            f"{args.checkpoint} contains classes that are not known to be safe "
            f"({_one_line(error).partition('. ')[0][:200]}); if you trust its source, use --trust.",
        )
    except (ImportError, OSError, ValueError, RuntimeError, NotImplementedError) as error:
        return _fail(args.command, _one_line(error))
    except Exception as error:
        addresses = [
            text for text in vars(args).values() if isinstance(text, str) and "://" in text
        ]
        if not addresses:
            raise
        # Packages for remote storage raise exceptions of their own, as botocore does.
        return _fail(args.command, f"{', '.join(addresses)}: {_one_line(error)}")
    return status


def _fail(command: str, text: str) -> int:
    print(f"lightning-zero {command}: error: {text}", file=sys.stderr)
    return 2


def _one_line(error: Exception) -> str:
    """Text of an error on one line; control characters (of file names) are escaped."""
    return escaped(" ".join(str(error).split())) or type(error).__name__
