"""linattn-tl doctor: what this machine has, and what will serve each op."""

import argparse
import json
import platform
from typing import Any

from linattn_tl.cli._text import table

NAME = "doctor"
HELP = "what this machine has, and what will serve each op"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dim", type=int, default=64, metavar="D", help="head dims K = V to ask about (default 64)")


def run(args: argparse.Namespace) -> int:
    report = examine(args.dim)
    print(json.dumps(report, indent=1) if args.json else _text(report))
    return 0


def examine(dim: int) -> dict[str, Any]:
    import torch

    import linattn_tl
    from autotune import build, target
    from linattn_tl import loader, registry, settings
    from tl_kernels.spec import DTYPES, Problem

    device = target.native()
    tools = build.tools()
    served = {}
    for op in registry.all_ops().values():
        for dtype in DTYPES:
            found = registry.explain_problem(op, Problem(op.name, dtype, dim, dim))
            served[f"{op.name} {dtype}"] = {"backend": found.backend, "reasons": dict(found.rows)}
    return {
        "linattn_tl": linattn_tl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": device.name if device else platform.machine(),
        "levels": [t.arch for t in target.offered()],
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "compiler": tools.missing or f"tilelang {build.TILELANG}, g++ {tools.version}",
        "cache": str(settings.cache_dir()),
        "binaries": sum(1 for store in loader.stores() for _ in store.entries()),
        "dim": dim,
        "served": served,
    }


def _text(report: dict[str, Any]) -> str:
    names = ("linattn_tl", "python", "torch", "threads", "cpu", "levels", "cuda", "compiler", "cache", "binaries")
    head = [f"{name:<11}{_word(report[name])}" for name in names]
    rows = []
    for call, found in report["served"].items():
        op, dtype = call.split()
        rows.append((op, dtype, found["backend"] or "nothing", _why(found)))
    title = f"what serves each op, at K = V = {report['dim']} (jit: built and checked on the first call):"
    return "\n".join([*head, "", title, table(("op", "dtype", "backend", "why not a binary"), rows)])


def _why(found: dict[str, Any]) -> str:
    """Why it is not a stored binary; that there is none yet needs few words."""
    if found["backend"] == "binary":
        return ""
    reason = found["reasons"].get("binary", "").removeprefix("cannot: ")
    return "not built yet; `linattn-tl tune` does it" if "linattn-tl tune" in reason else reason


def _word(value: Any) -> str:
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
