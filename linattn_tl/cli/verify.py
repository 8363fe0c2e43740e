"""linattn-tl verify: are the stored binaries whole, current, checked, and fit to be loaded and launched."""

import argparse
import json
from typing import Any

from linattn_tl.cli._progress import Bars
from linattn_tl.cli._text import table

NAME = "verify"
HELP = "check the binaries in the cache and in the wheel"
EXECUTION_TIMEOUT_S = 120.0
COUNTS = ("binaries", "served", "executed", "emulated", "unchecked", "stale", "complaints")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="comma-separated (default: all)")
    parser.add_argument(
        "--execute", action="store_true", help="run what this CPU can run against the float64 definition again"
    )


def run(args: argparse.Namespace) -> int:
    with Bars() as bars:
        report = examine(args.arch.split(",") if args.arch else None, args.execute, bars)
    print(json.dumps(report, indent=1) if args.json else _text(report))
    return 1 if report["complaints"] else 0


def examine(archs: list[str] | None, execute: bool, bars: Bars) -> dict[str, Any]:
    from autotune import target
    from linattn_tl import loader, packaging

    for arch in archs or ():
        target.named(arch)
    inventory = packaging.take_inventory(archs, bars.show)
    complaints = [{"arch": "", "binary": str(path), "complaint": DAMAGED} for path in inventory.damaged]
    for i, stored in enumerate(inventory.stored):
        complaints += [_complaint(stored, text) for text in check(stored)]
        bars.show("check statically", i + 1, len(inventory.stored))
    executed = []
    if execute:
        executed = [x for x in inventory.stored if _can_execute(x)]
        complaints += [_complaint(stored, text) for stored, text in _execute(executed, bars)]
    found = dict.fromkeys(x.arch for x in inventory.stored)
    order = [a for a in (*target.CPU_ARCHS, *target.SHARED_LIMIT) if a in found]
    return {
        "stores": [str(store.root) for store in loader.stores()],
        "archs": [_count(arch, inventory.stored, complaints) for arch in (*order, *sorted(found.keys() - {*order}))],
        "executed": len(executed) if execute else None,
        "complaints": complaints,
    }


DAMAGED = "is not whole, and no call is served by it: its manifest or its binary is damaged or of another format"


def check(stored: Any) -> list[str]:
    """What is wrong with a binary that calls may be served by. Stale ones are of other rules, and only take space."""
    from autotune import static_check

    if stored.state != "served":
        return []
    known, manifest = stored.known, stored.entry.manifest
    complaints = static_check.check(
        manifest, stored.entry.path.read_bytes(), known.kernel.expects(known.problem, known.device)
    )
    if not stored.verified:
        complaints.append(f"calls are served by it, and it was not checked: verified is {manifest.get('verified')!r}")
    return complaints


def _complaint(stored: Any, text: str) -> dict[str, str]:
    from linattn_tl import packaging

    return {"arch": stored.arch, "binary": packaging.describe(stored), "complaint": text}


def _count(arch: str, all_stored: Any, complaints: list[dict[str, str]]) -> dict[str, Any]:
    here = [x for x in all_stored if x.arch == arch]
    served = [x for x in here if x.state == "served"]
    verified = [str(x.entry.manifest.get("verified")) for x in served]
    return {
        "arch": arch,
        "binaries": len(here),
        "MB": round(sum(x.entry.manifest["size"] for x in here) / 1e6, 2),
        "served": len(served),
        "executed": sum(v.startswith("executed") for v in verified),
        "emulated": sum(v.startswith("emulated") for v in verified),
        "unchecked": sum(x.state == "apart" for x in here),
        "stale": sum(x.state == "stale" for x in here),
        "complaints": sum(c["arch"] == arch for c in complaints),
    }


def _text(report: dict[str, Any]) -> str:
    head = ("arch", "MB", *COUNTS)
    total = {name: sum(a[name] for a in report["archs"]) for name in head[1:]}
    rows = [[a[name] for name in head] for a in report["archs"]]
    if len(rows) > 1:
        rows.append(["all", round(total["MB"], 2), *(total[name] for name in COUNTS)])
    lines = [f"{total['binaries']} whole binaries in {' and '.join(report['stores'])}"]
    if rows:
        lines += [table(head, rows), ""]
    if report["executed"] is not None:
        lines.append(f"{report['executed']} executed here against the float64 definition")
    complaints = report["complaints"]
    lines.append(f"{len(complaints)} complaints" + (":" if complaints else ""))
    return "\n".join([*lines, *(f"  {c['binary']}: {c['complaint']}" for c in complaints)])


# ---- execution


def _can_execute(stored: Any) -> bool:
    from autotune import target

    return stored.state == "served" and stored.arch in [t.arch for t in target.offered()]


def _execute(binaries: list[Any], bars: Bars) -> list[tuple[Any, str]]:
    """Check binaries in child processes, so that one that crashes is a complaint; what is wrong with which."""
    from autotune import target
    from autotune.pool import Outcome, run_tasks

    wrong: list[tuple[Any, str]] = []
    done: list[int] = []

    def on_result(outcome: Outcome) -> None:
        done.append(outcome.task_index)
        if outcome.status != "ok":
            wrong.append((binaries[outcome.task_index], f"executed: {outcome.error or outcome.status}"))
        bars.show("execute", len(done), len(binaries))

    tasks = [(x.known.kernel.name, x.known.problem, x.arch, x.known.config, x.entry.path) for x in binaries]
    jobs = min(target.usable_cores(), max(len(tasks), 1))
    worker = "linattn_tl.cli.verify:execute_binary"
    run_tasks(tasks, worker, jobs=jobs, timeout_s=EXECUTION_TIMEOUT_S, on_result=on_result)
    return wrong


def execute_binary(task: tuple[str, Any, str, Any, Any]) -> None:
    """Check a stored CPU binary against the definition; raises VerificationError. Runs in a child."""
    from autotune.launcher.cpu import CpuBinary
    from linattn_tl import trials

    name, problem, _, config, path = task
    compiled, kernel = trials.find_kernel(name, problem.device)
    compiled.trial.check(kernel, problem, CpuBinary(path, kernel, config))
