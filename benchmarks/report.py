"""Results as text and as JSON, and which targets they meet."""

import os
import subprocess
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from autotune import measure, target
from benchmarks.cases import FLOPS_CHUNK, OURS, Result
from linattn_tl.cli._text import table

WIDTH = 120
BUSY_CORES = 0.2  # used by others, from which the numbers mean little

TITLES = {
    "forward": "forward, float32, B=1 H=8",
    "backward": "forward + backward, float32, B=1 H=8",
    "long": "long forward, float32, B=1 H=8",
    "dtype": "forward in 16 bits against our own float32, B=1 H=8",
    "decode": "one decode step, float32 state, H=16; a state that fits the cache beats a large copy",
}


@dataclass(frozen=True)
class Machine:
    cpu: str
    arch: str
    cores: int
    torch: str
    commit: str
    busy_cores: float  # what others used while this process slept, before and after
    peak_gflops: dict[int, float]  # threads -> fp32 matmul
    copy_gbps: float  # one thread


@dataclass(frozen=True)
class Target:
    """A ratio that we want: a rival's time over ours, or (at_most) ours in another dtype over fp32."""

    text: str
    group: str
    rival: str
    bound: float
    D: int = 128
    at_most: bool = False


TARGETS = (
    Target("forward D=128, eager chunked / ours", "forward", "eager chunked", 4.0),
    Target("forward D=128, compile chunked / ours", "forward", "compile chunked", 3.5),
    Target("forward D=64, eager chunked / ours", "forward", "eager chunked", 3.5, D=64),
    Target("forward T=16384, eager chunked / ours", "long", "eager chunked", 7.0),
    Target("forward + backward D=128, eager chunked / ours", "backward", "eager chunked", 3.0),
    Target("forward + backward D=128, compile chunked / ours", "backward", "compile chunked", 2.2),
    Target("decode B=16, eager in place / ours", "decode", "eager in place", 2.5),
    Target("forward, bfloat16 / float32", "dtype", "bfloat16", 1.4, at_most=True),
    Target("forward, float16 / float32", "dtype", "float16", 1.4, at_most=True),
)
OVERHEAD_US, IMPORT_S = 15.0, 0.3
TARGET_BATCH = 16  # of decode


@dataclass(frozen=True)
class Verdict:
    target: str
    needed: str
    threads: int
    value: float
    unit: str
    met: bool

    def __str__(self) -> str:
        return f"{self.value:.3g}{self.unit} {'met' if self.met else 'NOT MET'}"


@dataclass
class Run:
    """All that was measured."""

    machine: Machine
    results: list[Result] = field(default_factory=list)
    overhead_us: dict[str, tuple[float, float]] = field(default_factory=dict)  # op -> call, launch
    import_s: float | None = None
    left_out: dict[str, str] = field(default_factory=dict)  # what could not be measured, and why


def this_machine(threads: Sequence[int]) -> Machine:
    device = target.native()
    busy = busy_cores()
    torch.set_num_threads(1)
    return Machine(
        cpu=device.name if device else "unknown CPU",
        arch=device.arch if device else "no compiled kernels",
        cores=device.cores if device else os.cpu_count() or 1,
        torch=torch.__version__,
        commit=_commit(),
        busy_cores=busy,
        peak_gflops={t: measure.peak_gflops(t) for t in threads},
        copy_gbps=measure.bandwidth_gbps(),
    )


def busy_cores() -> float:
    """Cores in use while this process sleeps for half a second, 0 where /proc/stat does not tell."""
    try:
        before = _busy_ticks()
        time.sleep(0.5)
        return round((_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / 0.5, 2)
    except OSError:
        return 0.0


def _busy_ticks() -> int:
    user, nice, system, _idle, _wait, *interrupts = map(int, Path("/proc/stat").read_text().split()[1:9])
    return user + nice + system + sum(interrupts)


def _commit() -> str:
    """Short commit of the source tree, and whether files differ from it; "unknown" outside of one."""
    root = Path(__file__).parents[1]
    try:
        head = _git(root, "rev-parse", "--short", "HEAD")
        return head + ("+changes" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(root: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


# ---- text


def header(machine: Machine, rounds: int) -> str:
    m = machine
    peaks = ", ".join(f"{gflops:.0f} GFLOP/s ({_threads(t)})" for t, gflops in m.peak_gflops.items())
    busy = [f"OTHERS USED {m.busy_cores:.1f} CORES: these numbers are rough."] if m.busy_cores > BUSY_CORES else []
    return "\n".join(
        [
            *busy,
            f"{m.cpu}, {m.arch}, {m.cores} cores; torch {m.torch}; commit {m.commit}",
            f"peak: fp32 matmul {peaks}, copy {m.copy_gbps:.0f} GB/s (1 thread)",
            f"Medians of {rounds} rounds in turns, on the same inputs, after each output was checked against float64.",
            "A rival's column is its time over ours. chunked: the form as usually written; tuned: the fastest we know.",
            "GFLOP/s count what causal chunks of C tokens need at least, with",
            f"C={FLOPS_CHUNK}: 4KV + (C+1)(K+V) a token and value head; with backward 14KV + 4(C+1)(K+V).",
        ]
    )


def text(run: Run, rounds: int) -> str:
    parts = [header(run.machine, rounds)]
    for group, title in TITLES.items():
        results = [r for r in run.results if r.case.group == group]
        if results:
            parts.append(f"{title}\n{_group_table(group, results, run.machine)}\n{_variants(results)}".rstrip())
    if run.overhead_us:
        rows = [
            (op, f"{call:.1f}", f"{launch:.1f}", f"{call - launch:.1f}")
            for op, (call, launch) in run.overhead_us.items()
        ]
        parts.append("tiny call\n" + table(("op", "call us", "launch us", "overhead us"), rows))
    if run.import_s is not None:
        parts.append(f"import linattn_tl and its op: {run.import_s * 1e3:.0f} ms over torch's own")
    parts += [f"not measured: {what}: {why}" for what, why in run.left_out.items()]
    parts.append(targets_text(run))
    return "\n\n".join(part for part in parts if part)


def _threads(n: int) -> str:
    return f"{n} thread{'s' if n > 1 else ''}"


def _group_table(group: str, results: Sequence[Result], machine: Machine) -> str:
    rivals = list(dict.fromkeys(name for r in results for name in r.case.rivals))
    if group == "decode":
        head = ("B", "D", "threads", "ours us", "GB/s", "of copy")
        rows = [_decode_cells(r, machine) for r in results]
    else:
        head = ("T", "D", "threads", "ours ms", "GFLOP/s", "of peak")
        rows = [_sequence_cells(r, machine) for r in results]
    ratios = [[_times(r.ratio(name)) for name in rivals] for r in results]
    return table((*head, *rivals), [(*row, *ratio) for row, ratio in zip(rows, ratios, strict=True)])


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def _sequence_cells(r: Result, machine: Machine) -> tuple[str, ...]:
    case, us = r.case, r.times[OURS].median_us
    speed = case.flops / us / 1e3
    share = speed / machine.peak_gflops[case.threads]
    return str(case.T), str(case.D), str(case.threads), f"{us / 1e3:.1f}", f"{speed:.1f}", f"{share:.0%}"


def _decode_cells(r: Result, machine: Machine) -> tuple[str, ...]:
    case, us = r.case, r.times[OURS].median_us
    speed = case.state_bytes / us / 1e3
    share = speed / machine.copy_gbps
    return str(case.B), str(case.D), str(case.threads), f"{us:.0f}", f"{speed:.1f}", f"{share:.0%}"


def _variants(results: Sequence[Result]) -> str:
    """Which backend served ours, which variant of each rival was the fastest, and who was left out."""
    found: dict[str, dict[str, None]] = {}
    for r in results:
        for name, variant in r.variants.items():
            if variant:
                found.setdefault(name, {})[variant] = None
        for name, why in r.left_out.items():
            found.setdefault(name, {})[f"left out, {why}"] = None
    line = "; ".join(f"{name}: {', '.join(variants)}" for name, variants in found.items())
    return textwrap.fill(line, WIDTH)


# ---- targets


def verdicts(run: Run) -> list[Verdict]:
    found = []
    for wanted in TARGETS:
        for r in run.results:
            case = r.case
            ratio = r.ratio(wanted.rival)
            if (case.group, case.D) != (wanted.group, wanted.D) or ratio is None:
                continue
            if case.group == "decode" and case.B != TARGET_BATCH:
                continue
            met = ratio <= wanted.bound if wanted.at_most else ratio >= wanted.bound
            needed = f"{'<=' if wanted.at_most else '>='} {wanted.bound:g}x"
            found.append(Verdict(wanted.text, needed, case.threads, ratio, "x", met))
    for op, (call, launch) in run.overhead_us.items():
        cost = call - launch
        text = f"overhead of {op}"
        found.append(Verdict(text, f"<= {OVERHEAD_US:g} us", 1, cost, " us", cost <= OVERHEAD_US))
    if run.import_s is not None:
        found.append(Verdict("import", f"<= {IMPORT_S:g} s", 1, run.import_s, " s", run.import_s <= IMPORT_S))
    return found


def targets_text(run: Run) -> str:
    found = verdicts(run)
    if not found:
        return ""
    counts = sorted({v.threads for v in found})
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for v in found:
        rows.setdefault((v.target, v.needed), {})[v.threads] = str(v)
    head = ("target", "needed", *map(_threads, counts))
    body = [(*key, *(cells.get(t, "") for t in counts)) for key, cells in rows.items()]
    return f"{sum(v.met for v in found)} of {len(found)} targets met\n{table(head, body)}"


# ---- JSON


def as_json(run: Run, rounds: int) -> dict[str, Any]:
    return {
        "machine": asdict(run.machine),
        "rounds": rounds,
        "results": [_result_json(r) for r in run.results],
        "overhead_us": {op: {"call": call, "launch": launch} for op, (call, launch) in run.overhead_us.items()},
        "import_s": run.import_s,
        "left_out": run.left_out,
        "targets": [asdict(v) for v in verdicts(run)],
    }


def _result_json(r: Result) -> Mapping[str, Any]:
    case = r.case
    contestants = {
        name: {
            "median_us": t.median_us,
            "min_us": t.min_us,
            "iqr_us": t.iqr_us,
            "ratio": r.ratio(name),
            "variant": r.variants[name],
        }
        for name, t in r.times.items()
    }
    sizes = {name: getattr(case, name) for name in ("group", "threads", "B", "T", "H", "D", "dtype")}
    work = {"state_bytes": case.state_bytes} if case.group == "decode" else {"flops": case.flops}
    return {**sizes, **work, "contestants": contestants, "left_out": r.left_out}
