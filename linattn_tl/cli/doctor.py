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
    from linattn_tl import devices, loader, registry, settings
    from tl_kernels.spec import DTYPES, Problem

    device = target.native()
    tools = build.tools()
    gpus = [devices.gpu(i) for i in range(torch.cuda.device_count())]
    served = {}
    for where in ("cpu", "cuda") if gpus else ("cpu",):
        for op in registry.all_ops().values():
            for dtype in DTYPES:
                found = registry.explain_problem(op, Problem(op.name, dtype, dim, dim, where))
                served[f"{op.name} {dtype} {where}"] = {"backend": found.backend, "reasons": dict(found.rows)}
    return {
        "linattn_tl": linattn_tl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": device.name if device else platform.machine(),
        "levels": [t.arch for t in target.offered()],
        "cuda": [f"{gpu[0].name} ({gpu[0].arch})" if gpu else "one without kernels" for gpu in gpus],
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
        rows.append((*call.split(), found["backend"] or "nothing", _why(found)))
    title = f"what serves each op, at K = V = {report['dim']} (jit: built and checked on the first call):"
    return "\n".join([*head, "", title, table(("op", "dtype", "on", "backend", "why not a binary"), rows)])


def _why(found: dict[str, Any]) -> str:
    """Why it is not a stored binary; that there is none yet needs few words."""
    if found["backend"] == "binary":
        return ""
    reason = found["reasons"].get("binary", "").removeprefix("cannot: ")
    if "linattn-tl tune" in reason:
        return "not built yet; `linattn-tl tune` does it"
    return "not built yet; `linattn-tl build` does it" if "linattn-tl build" in reason else reason


def _word(value: Any) -> str:
    if value is None or value == []:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
