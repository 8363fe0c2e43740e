"""Everything that only a GPU can tell, in one run: `make gpu-check`, or `python -m benchmarks.gpu_check [--json FILE]`.

Needs an NVIDIA GPU, torch with CUDA and numpy; neither tilelang nor nvcc nor a compiler. The CUDA binaries were built
elsewhere and are found in LINATTN_TL_CACHE_DIR or in the installed wheel.

    environment    the device, its driver and clocks, and which binaries fit it
    kernels        each stored binary, every config, against the definition in float64
    ops            each public op x pass x dtype x case, forward and gradients
    requirements   streams, graphs, determinism, large indices, head dims, devices, no waiting
    timing         against the device's copy bandwidth and other implementations, in one run

Each section is a process of its own, so that a kernel that breaks the device, hangs or crashes costs one check: a new
process goes on behind it. Exit status: 0 all right, 1 something is wrong, 2 no GPU.

--device cpu goes through what makes sense without a GPU, in this process: a test of this script, not of a device.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

import linattn_tl
from benchmarks import gpu_cases, gpu_requirements, gpu_timing, report
from benchmarks.gpu_rows import Check, DeviceLost, Found, NotRun, Row, Session, WrongResult, run_section
from linattn_tl.cli._text import table

ROOT = Path(__file__).parents[1]
FORMAT = 1
NO_GPU, DEVICE_LOST = 2, 3  # exit statuses
DEVICE_LOST_STATUS = f"exit status {DEVICE_LOST}"
TOTAL_S = 280.0  # what all sections may take together
SHARES = {"environment": 1, "kernels": 6, "ops": 7, "requirements": 7, "timing": 6}  # of the time that is left
HANG_S = 60.0  # a process that says nothing for so long hangs: no check takes longer
POLL_S = 0.05
RESTARTS = 5  # of a section, after checks that broke the device
SAY_EVERY_S = 1.0
SHOWN_FAILURES = 15
CLOCK_FIELDS = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit", "temperature.gpu")


# ---- section: environment


def environment_checks(session: Session) -> list[Check]:
    """What the numbers depend on; wrong only if no binary fits the device."""
    checks = [Check("device", partial(device_facts, session)), Check("binaries", partial(stored_binaries, session))]
    return [*checks, Check("clocks", partial(clocks, session))] if session.cuda else checks


def device_facts(session: Session) -> Found:
    facts: dict[str, Any] = {
        "device": str(session.device),
        "name": "CPU",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "linattn_tl": linattn_tl.__version__,
    }
    if session.cuda:
        p = torch.cuda.get_device_properties(session.device)
        facts |= {
            "name": p.name,
            "compute_capability": f"{p.major}.{p.minor}",
            "multiprocessors": p.multi_processor_count,
            "memory_gb": round(p.total_memory / 1e9, 1),
            "l2_cache_bytes": p.L2_cache_size,
            "cuda_runtime": torch.version.cuda,
            "gpus": torch.cuda.device_count(),
        }
    return Found(", ".join(f"{k} {v}" for k, v in facts.items() if k in ("name", "compute_capability", "torch")), facts)


def stored_binaries(session: Session) -> Found:
    counts = Counter(f"{e.manifest['arch']} {e.manifest['dtype']}" for e in gpu_cases.entries(session.device))
    if not counts:
        archs = " or ".join(gpu_cases.runnable_archs(session.device)) or "no arch that can be built for"
        raise WrongResult(f"no stored binary fits this device ({archs})")
    return Found(", ".join(f"{n} {what}" for what, n in sorted(counts.items())), {"binaries": dict(counts)})


def clocks(session: Session) -> Found:
    """As nvidia-smi reads them before anything runs."""
    uuid = getattr(torch.cuda.get_device_properties(session.device), "uuid", None)
    which = [f"--id=GPU-{str(uuid).removeprefix('GPU-')}"] if uuid else []
    command = ["nvidia-smi", *which, f"--query-gpu={','.join(CLOCK_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotRun(f"nvidia-smi does not tell: {error}") from None
    values = [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    found: dict[str, Any] = dict(zip(CLOCK_FIELDS, values, strict=True))
    return Found(", ".join(f"{name} {value}" for name, value in found.items()), found)


SECTIONS: dict[str, Callable[[Session], list[Check]]] = {
    "environment": environment_checks,
    "kernels": gpu_cases.kernel_checks,
    "ops": gpu_cases.op_checks,
    "requirements": gpu_requirements.requirement_checks,
    "timing": gpu_timing.timing_checks,
}
WITHOUT_GPU = ("environment", "ops", "requirements", "timing")


# ---- going through the sections


@dataclass
class Report:
    """All that was found."""

    session: Session
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def environment(self) -> dict[str, Any]:
        return {name: x for row in self.rows if row.section == "environment" for name, x in row.numbers.items()}

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.ok is False]

    @property
    def timings(self) -> list[dict[str, Any]]:
        return [row.numbers for row in self.rows if row.section == "timing" and "times" in row.numbers]

    def counts(self, section: str) -> dict[str, int]:
        outcomes = Counter(row.ok for row in self.rows if row.section == section)
        return {"passed": outcomes[True], "failed": outcomes[False], "not_run": outcomes[None]}


class Progress:
    """Lines on stderr: whatever is wrong, and about one a second of the rest."""

    def __init__(self) -> None:
        self._said, self._done = 0.0, Counter[str]()

    def __call__(self, row: Row, total: int) -> None:
        self._done[row.section] += 1
        now, done = time.monotonic(), self._done[row.section]
        if row.ok is False or done == total or now - self._said >= SAY_EVERY_S:
            self._said = now
            word = {True: "ok", False: "FAILED", None: "not run"}[row.ok]
            print(f"[{row.section} {done}/{total}] {word}: {row.name}: {row.detail}", file=sys.stderr, flush=True)


def here(section: str, session: Session, limit_s: float, progress: Progress) -> list[Row]:
    """A section in this process."""
    rows: list[Row] = []

    def on_row(row: Row, total: int) -> None:
        rows.append(row)
        progress(row, total)

    run_section(section, SECTIONS[section], session, on_row, deadline=time.monotonic() + limit_s)
    return rows


def child_command(section: str, session: Session, limit_s: float, rows: Path, first: int) -> list[str]:
    quick = ["--quick"] if session.quick else []
    return [
        sys.executable, "-m", "benchmarks.gpu_check", "--device", str(session.device), "--only", section,
        "--rows", str(rows), "--first", str(first), "--limit", str(limit_s), *quick,
    ]  # fmt: skip


def isolated(section: str, session: Session, limit_s: float, progress: Progress) -> list[Row]:
    """A section in a process of its own, and in a new one behind each check that took its process along."""
    rows: list[Row] = []
    end = time.monotonic() + limit_s
    for _ in range(RESTARTS + 1):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "said.jsonl")
            command = child_command(section, session, max(end - time.monotonic(), 0.0), file, len(rows))
            how, at = _run_child(command, file, rows, progress)
        if how == "" or (at is None and how != DEVICE_LOST_STATUS):
            break
        if at is not None:
            rows.append(Row(section, at, False, f"it took its process along: {how}"))
            progress(rows[-1], len(rows))
    if how:
        rows.append(Row(section, "the rest", False, f"given up: {how}"))
        progress(rows[-1], len(rows))
    return rows


def _run_child(command: Sequence[str], file: Path, rows: list[Row], progress: Progress) -> tuple[str, str | None]:
    """Run a section's process, taking its rows as they come.

    Returns "" if it ended well, else how it ended; and the check that it was at, if any.
    """
    at, heard, taken = None, time.monotonic(), 0
    with subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr) as child:
        while True:
            done = child.poll() is not None
            lines = file.read_text().split("\n")[:-1] if file.exists() else []  # the last one may be half written
            for said in map(json.loads, lines[taken:]):
                at = said.get("begun")
                if at is None:
                    rows.append(Row(**said["row"]))
                    progress(rows[-1], said["total"])
            if len(lines) > taken:
                heard, taken = time.monotonic(), len(lines)
            if done:
                break
            if time.monotonic() - heard > HANG_S:
                child.kill()
                return f"nothing for {HANG_S:.0f} s", at
            time.sleep(POLL_S)
    status = child.returncode
    return "" if status == 0 else f"signal {-status}" if status < 0 else f"exit status {status}", at


def as_child(section: str, session: Session, args: argparse.Namespace) -> int:
    """What a section's process does: say each check and its row in a file, as they come."""
    deadline = time.monotonic() + args.limit
    with args.rows.open("w") as file:

        def say(**said: Any) -> None:
            file.write(json.dumps(said) + "\n")
            file.flush()

        try:
            run_section(
                section, SECTIONS[section], session, lambda row, total: say(row=asdict(row), total=total),
                on_start=lambda name: say(begun=name), first=args.first, deadline=deadline,
            )  # fmt: skip
        except DeviceLost:
            return DEVICE_LOST
    return 0


def go_through(sections: Sequence[str], session: Session) -> Report:
    found, start, progress = Report(session), time.monotonic(), Progress()
    run = isolated if session.cuda else here
    for i, section in enumerate(sections):
        left = TOTAL_S - (time.monotonic() - start)
        share = SHARES[section] / sum(SHARES[name] for name in sections[i:])
        found.rows += run(section, session, max(left, 0.0) * share, progress)
    found.seconds = round(time.monotonic() - start, 1)
    return found


# ---- what comes out


def as_json(found: Report, sections: Iterable[str]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "commit": report._commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": found.seconds,
        "quick": found.session.quick,
        "environment": found.environment,
        "sections": {section: found.counts(section) for section in sections},
        "rows": [asdict(row) for row in found.rows],
        "timings": found.timings,
    }


def text(found: Report, sections: Sequence[str]) -> str:
    """One screen: counts, times, failures."""
    env = found.environment
    head = ", ".join(str(env[name]) for name in ("name", "compute_capability", "driver_version") if name in env)
    counts = [(s, *found.counts(s).values()) for s in sections]
    parts = [
        f"{head}; torch {torch.__version__}; commit {report._commit()}; {found.seconds:.0f} s",
        table(("section", "passed", "failed", "not run"), counts),
    ]
    if found.timings:
        parts.append(_timing_text(found))
    parts += [_line("not run:", row) for row in _first_of_each_reason(found.rows)]
    failed = found.failed
    parts += [_line("FAILED", row) for row in failed[:SHOWN_FAILURES]]
    if len(failed) > SHOWN_FAILURES:
        parts.append(f"and {len(failed) - SHOWN_FAILURES} more failures: --json FILE has them all")
    return "\n".join(parts)


def _first_of_each_reason(rows: Sequence[Row]) -> list[Row]:
    """Of the checks that were not run."""
    return list({(row.section, row.detail): row for row in reversed(rows) if row.ok is None}.values())[::-1]


def _line(word: str, row: Row) -> str:
    return textwrap.shorten(f"{word} {row.section}: {row.name}: {row.detail}", 2 * report.WIDTH, placeholder=" ...")


def _timing_text(found: Report) -> str:
    rivals = list(dict.fromkeys(name for t in found.timings for name in t["ratios"]))
    rows = [
        (
            t["what"], t["dtype"], t["B"], t["H"], t["T"], t["D"],
            f"{t['times'][gpu_timing.OURS]['median_us']:.0f}", f"{t['gbps']:.4g}", f"{t['share_of_copy']:.0%}",
            *(f"{t['ratios'][name]:.2f}x" if name in t["ratios"] else "-" for name in rivals),
        )
        for t in found.timings
    ]  # fmt: skip
    head = ("timing", "dtype", "B", "H", "T", "D", "us", "GB/s", "of copy", *(f"{name}/ours" for name in rivals))
    return table(head, rows)


def slug(name: str) -> str:
    """A device's name as a file's: "NVIDIA H100 80GB HBM3" -> "nvidia-h100-80gb-hbm3"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"


def save(found: Report, sections: Sequence[str], args: argparse.Namespace) -> list[Path]:
    files = [args.json] if args.json else []
    if args.save:
        files.append(args.save / f"{slug(found.environment.get('name', 'unknown'))}.json")
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(as_json(found, sections), indent=1) + "\n")
    return files


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_check", description="All that only a GPU can tell.")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"), help="cuda, cuda:1, ... or cpu")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--only", type=_section_names, metavar="SECTIONS", help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="also write everything to DIR/<the device's name>.json"
    )
    for name, kind in (("--rows", Path), ("--first", int), ("--limit", float)):  # between this script's processes
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device.type not in ("cuda", "cpu"):
        parser.error(f"--device is {args.device}; expected cuda, cuda:N or cpu")
    return args


def _section_names(given: str) -> list[str]:
    names = given.split(",")
    for name in names:
        if name not in SECTIONS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(SECTIONS)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device = args.device
    if device.type == "cuda":
        if not torch.cuda.is_available():
            print("gpu_check: torch sees no CUDA device; --device cpu tests this script without one", file=sys.stderr)
            return NO_GPU
        device = torch.device("cuda", device.index or 0)
    session = Session(device, args.quick)
    possible = SECTIONS if session.cuda else WITHOUT_GPU
    sections = [name for name in possible if args.only is None or name in args.only]
    if args.rows:
        if session.cuda:
            torch.cuda.set_device(device)
        return as_child(sections[0], session, args)
    found = go_through(sections, session)
    print(text(found, sections))
    for file in save(found, sections, args):
        print(f"wrote {file}")
    return 1 if found.failed else 0


if __name__ == "__main__":
    sys.exit(main())
