"""linattn-tl build: compile kernels for given architectures, without tuning."""

import argparse
import json
import sys
from typing import Any

NAME = "build"
HELP = "compile every kernel's best config for given architectures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default="cpu-v3,cpu-v4", help="comma-separated (default cpu-v3,cpu-v4)")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16", help="comma-separated (default: all three)")


def run(args: argparse.Namespace) -> int:
    from linattn_tl import settings, tuning

    outcomes = tuning.build_best(args.arch.split(","), args.dtypes.split(","), 0, _say)
    failed = [o for o in outcomes if o["status"] != "ok"]
    if args.json:
        print(json.dumps({"cache": str(settings.cache_dir()), "built": outcomes}, indent=1))
    else:
        print(f"{len(outcomes) - len(failed)} binaries in {settings.cache_dir()}")
        for o in failed:
            print(f"  failed: {o['kernel']} {o['dtype']} {o['arch']}: {o['error']}")
    return 1 if failed else 0


def _say(outcome: dict[str, Any], done: int, total: int) -> None:
    print(
        f"[{done}/{total}] {outcome['arch']} {outcome['kernel']} {outcome['dtype']}: {outcome['status']}",
        file=sys.stderr,
    )
