"""The command line, linattn-tl: one file a subcommand.

A file has NAME, HELP, add_arguments(parser) and run(args) -> exit code, and imports what is heavy inside run.
"""

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

# as a newcomer needs them; others follow
ORDER = ("doctor", "tune", "build", "show", "verify", "wheel", "explain", "bench", "cache")


def commands() -> list[ModuleType]:
    names = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    names.sort(key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))
    return [importlib.import_module(f"{__name__}.{n}") for n in names]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "linattn-tl", description="Linear-attention kernels: what is here, build, tune, ship."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in commands():
        sub = subparsers.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        command.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="machine-readable output on stdout")
        sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"linattn-tl {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"linattn-tl {args.command}: interrupted; what was finished is kept", file=sys.stderr)
        return 130
