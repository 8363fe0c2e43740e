"""Proof that the detector fires: break a kernel's synchronisation in every way, one at a time, and see each caught.

All mutants of a kernel are compiled into one binary: each place of the generated source gets a switch,

    if (!emu_mutants[17]) __syncthreads();

so that a mutant costs a run and no build, and any set of them can be on at once. A mutant is caught when a run reports
a finding or gives other values than the kernel did.

A mutant that is not caught either shows a blind spot or changes what something else does as well. The second is argued
by a cover: other mutants that, switched on with it, give a finding which they do not give without it. So the survivor
does order something, and what the cover breaks orders it, too.
"""

import ctypes
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autotune.emulator.errors import EmulatorError
from autotune.emulator.lowering import Lowered
from autotune.emulator.report import Report
from autotune.emulator.runner import ASYNC_MODES, ORDERS, SCHEDULES, Emulated, differing, schedule_name

Schedule = tuple[str, str, int]
Arguments = Callable[[], Sequence[Any]]  # makes those of one run, fresh
Outputs = dict[str, torch.Tensor]
SECONDS = 5.0  # of a run: a mutant may loop for ever
SWITCHES = "emu_mutants"


@dataclass(frozen=True)
class Mutant:
    """One change of the generated source."""

    number: int
    line: int
    kind: str  # barrier, wait, commit, fence, mbarrier, guard
    change: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.change}"


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    caught: bool
    how: str  # the first finding, or how the values differ
    schedule: str  # the first one that caught it


@dataclass(frozen=True)
class Cover:
    """Why a survivor is redundant: what else does its work, and what is found when neither does."""

    others: tuple[Mutant, ...]
    finding: str

    def __str__(self) -> str:
        lines = ", ".join(str(line) for line in sorted({other.line for other in self.others}))
        return f"covered by line {lines}: without these it is needed ({self.finding})"


@dataclass
class Score:
    """What became of every mutant of a kernel."""

    kernel: str
    arch: str
    outcomes: list[Outcome] = field(default_factory=list)
    covers: dict[int, "Cover"] = field(default_factory=dict)  # by number of the survivor
    agreeing: set[int] = field(default_factory=set)  # survivors without a cover that no schedule tells from the kernel

    @property
    def survivors(self) -> list[Mutant]:
        return [outcome.mutant for outcome in self.outcomes if not outcome.caught]

    @property
    def uncovered(self) -> list[Mutant]:
        """Survivors that neither a cover nor equal values make redundant: each shows a blind spot."""
        return [m for m in self.survivors if m.number not in self.covers and m.number not in self.agreeing]

    def why(self, survivor: Mutant) -> str:
        if survivor.number in self.covers:
            return str(self.covers[survivor.number])
        if survivor.number in self.agreeing:
            return f"nothing covers it; values are the same under {len(STRESS)} schedules"
        return "nothing covers it, and values differ under some schedule: a blind spot of the checks"

    def to_dict(self) -> dict[str, Any]:
        covers = {number: [str(m) for m in cover.others] for number, cover in self.covers.items()}
        return {
            "kernel": self.kernel,
            "arch": self.arch,
            "mutants": len(self.outcomes),
            "caught": self._caught(),
            "survivors": [
                {"mutant": str(m), "covered_by": covers.get(m.number, []), "why": self.why(m)} for m in self.survivors
            ],
        }

    def __str__(self) -> str:
        kinds = sorted({outcome.mutant.kind for outcome in self.outcomes})
        lines = [f"{self.kernel} ({self.arch}): {self._caught()} of {len(self.outcomes)} mutants caught"]
        for kind in kinds:
            of_kind = [outcome for outcome in self.outcomes if outcome.mutant.kind == kind]
            caught = sum(outcome.caught for outcome in of_kind)
            lines.append(f"  {kind:<10}{caught:>4} of {len(of_kind)}")
        for mutant in self.survivors:
            lines.append(f"  survived  {mutant}")
            lines.append(f"            {self.why(mutant)}")
        return "\n".join(lines)

    def _caught(self) -> int:
        return sum(outcome.caught for outcome in self.outcomes)


# ---- where the source can be broken ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A statement, alone on its line, and what may become of it ("" is removed)."""

    kind: str
    statement: re.Pattern[str]
    weaker: Callable[[re.Match[str]], Sequence[str]]


def _rule(kind: str, statement: str, *weaker: Callable[[re.Match[str]], str]) -> Rule:
    return Rule(kind, re.compile(statement), lambda match: ["", *(change(match) for change in weaker)])


def _with(template: str, change: Callable[[int], int]) -> Callable[[re.Match[str]], str]:
    """The statement with its number changed."""
    return lambda match: template.format(*match.groups()[:-1], change(int(match.group(match.lastindex or 1))))


RULES = (
    _rule("barrier", r"__syncthreads\(\);"),
    _rule("barrier", r"__syncwarp\(.*\);"),
    _rule("barrier", r"tl::__sync_thread_partial(<.*>)?\(.*\);"),
    _rule("barrier", r"tl::__named_barrier_arrive\(.*\);"),
    _rule("commit", r"tl::cp_async_commit\(\);"),
    _rule("wait", r"tl::cp_async_wait<(\d+)>\(\);", _with("tl::cp_async_wait<{}>();", lambda n: n + 1)),
    _rule("commit", r"tl::warpgroup_commit_batch\(\);"),
    _rule("wait", r"tl::warpgroup_wait<(\d+)>\(\);", _with("tl::warpgroup_wait<{}>();", lambda n: n + 1)),
    _rule("wait", r"tl::wait_wgmma<(\d+)>\(\);", _with("tl::wait_wgmma<{}>();", lambda n: n + 1)),
    _rule("fence", r"tl::warpgroup_arrive\(\);"),
    _rule("fence", r"tl::fence_proxy_async\(\);"),
    _rule("fence", r"tl::fence_barrier_init\(\);"),
    _rule("commit", r"tl::tma_store_arrive\(\);"),
    _rule("wait", r"tl::tma_store_wait<.*>\(\);"),
    _rule("mbarrier", r"tl::mbarrier_cp_async_arrive(_noinc)?\(.*\);"),
    _rule("mbarrier", r"(\S+)\.arrive\(\);"),
    _rule("wait", r"(\S+)\.wait\((.*)\);", lambda match: f"{match[1]}.wait(({match[2]}) ^ 1);"),
    _rule(
        "mbarrier",
        r"(\S+)\.init\((\d+)\);",
        _with("{}.init({});", lambda n: n + 1),
        _with("{}.init({});", lambda n: max(1, n // 2) if n > 1 else 2),
    ),
    _rule(
        "mbarrier",
        r"(\S+)\.arrive_and_expect_tx\((\d+)\);",
        lambda match: f"{match[1]}.arrive();",
        _with("{}.arrive_and_expect_tx({});", lambda n: n // 2),
    ),
    _rule("mbarrier", r"(\S+)\.expect_transaction\((\d+)\);", _with("{}.expect_transaction({});", lambda n: n // 2)),
)
GUARD = re.compile(r"^(\s*)if \((.*)\) \{$")
HINT = re.compile(r"tl::prefetch_")  # a guard of hints: as right when every thread gives them
GUARDED_COPY = re.compile(
    r"^(\s*)(tl::(?:cp_async_gs|load_global_\d+|store_global_\d+)_conditional\w*(?:<\d+>)?\(.*)\);$"
)


def switched(source: str) -> tuple[str, tuple[Mutant, ...]]:
    """The source with a switch at each place that can be broken, line numbers kept, and the mutants."""
    lines = source.split("\n")
    mutants: list[Mutant] = []
    for number in _kernel_lines(lines):
        if not HINT.search(lines[number + 1]):
            lines[number] = _switch_line(lines[number], number + 1, mutants)
    declaration = (
        f'extern "C" {{ __attribute__((visibility("default"))) unsigned char {SWITCHES}[{len(mutants) + 1}]; }}'
    )
    first = next(i for i, line in enumerate(lines) if line.startswith('extern "C" __global__'))
    lines[first] = f"{declaration} {lines[first]}"
    return "\n".join(lines), tuple(mutants)


def _kernel_lines(lines: Sequence[str]) -> Iterable[int]:
    """Lines inside the bodies of kernels, not the host's part."""
    inside = False
    for number, line in enumerate(lines):
        if line.startswith('extern "C" __global__') and line.rstrip().endswith("{"):
            inside = True
        elif line.startswith("}"):
            inside = False
        elif inside:
            yield number


def _add(mutants: list[Mutant], line: int, kind: str, change: str) -> str:
    mutants.append(Mutant(len(mutants), line, kind, change))
    return f"{SWITCHES}[{len(mutants) - 1}]"


def _switch_line(text: str, line: int, mutants: list[Mutant]) -> str:
    statement = text.strip()
    indent = text[: len(text) - len(text.lstrip())]
    for rule in RULES:
        match = rule.statement.fullmatch(statement)
        if match:
            return indent + _switch_statement(statement, line, rule, match, mutants)
    guard = GUARD.match(text)
    if guard:
        switch = _add(mutants, line, "guard", f"if ({_shortened(guard[2])}) made true")
        return f"{guard[1]}if (({guard[2]}) || {switch}) {{"
    copy = GUARDED_COPY.match(text)
    if copy:
        switch = _add(mutants, line, "guard", f"condition of {_shortened(copy[2])} made true")
        return f"{copy[1]}{copy[2]} || {switch});"
    return text


def _switch_statement(statement: str, line: int, rule: Rule, match: re.Match[str], mutants: list[Mutant]) -> str:
    out = ""
    for change in dict.fromkeys(rule.weaker(match)):
        if change == statement:
            continue
        what = f"{_shortened(statement)} -> {_shortened(change)}" if change else f"{_shortened(statement)} removed"
        out += f"if ({_add(mutants, line, rule.kind, what)}) {{ {change} }} else "
    return out + statement


def _shortened(text: str, width: int = 60) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


# ---- running them ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What a mutant is tried on."""

    arguments: Arguments
    schedule: Schedule


class _Trial:
    """A kernel built from a switched source, and how to run it and compare what it gives."""

    def __init__(self, lowered: Lowered, arguments: Sequence[Arguments], cache: Path | None):
        source, self.mutants = switched(lowered.source)
        self.kernel = Emulated(dataclasses.replace(lowered, source=source), cache=cache)
        self.cases = [Case(make, schedule) for schedule in SCHEDULES for make in arguments]
        self._switches = (ctypes.c_ubyte * (len(self.mutants) + 1)).in_dll(self.kernel.library, SWITCHES)

    def run(self, case: Case, *on: Mutant, detect: bool = True) -> tuple[Report, Outputs]:
        """One run on fresh arguments with these mutants switched on."""
        ctypes.memset(self._switches, 0, len(self._switches))
        for mutant in on:
            self._switches[mutant.number] = 1
        given = case.arguments()
        async_mode, order, seed = case.schedule
        report = self.kernel(
            *given,
            async_mode=async_mode,
            order=order,
            seed=seed,
            detect=detect,
            count=False,
            max_findings=5000,
            max_seconds=SECONDS,
        )
        parameters = self.kernel.lowered.parameters
        outputs = {
            p.name: value for p, value in zip(parameters, given, strict=True) if p.kind == "tensor" and p.written
        }
        return report, outputs

    def same(self, one: Outputs, other: Outputs) -> bool:
        """Bit by bit, but for what is updated atomically, in an order that a mutant may change."""
        atomic = {p.name for p in self.kernel.lowered.parameters if p.atomic}
        return not any(differing(one[name], other[name], 1e-3 if name in atomic else 0.0).any() for name in one)


def mutate(
    lowered: Lowered,
    *arguments: Arguments,
    cache: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Score:
    """Run every mutant of a kernel until a run catches it, then say what makes the others redundant.

    Args:
        lowered: what `lower` gave.
        arguments: functions that make the arguments of one run, in the kernel's order: torch tensors, outputs filled
            with what no kernel should leave. A mutant is tried on each, under each schedule. Together their sizes must
            need every guard: a ragged one, one below a tile, an empty one.
        cache: folder for the built kernel.
        progress: told how many mutants of how many are done.

    Raises:
        EmulatorError: the kernel itself is not clean, so that nothing can be said of its mutants.
    """
    trial = _Trial(lowered, arguments, cache)
    expected = []
    for case in trial.cases:
        report, outputs = trial.run(case)
        if not report.clean:
            raise EmulatorError(f"{lowered.name}: mutants of a kernel that is not clean itself prove nothing\n{report}")
        expected.append(outputs)
    score = Score(lowered.name, lowered.arch)
    for mutant in trial.mutants:
        score.outcomes.append(_try(trial, expected, mutant))
        progress(len(score.outcomes), len(trial.mutants))
    covering = _Covering(trial)
    for mutant in score.survivors:
        cover = covering.of(mutant)
        if cover:
            score.covers[mutant.number] = cover
        elif _agrees(trial, mutant):
            score.agreeing.add(mutant.number)
    return score


def _try(trial: _Trial, expected: Sequence[Outputs], mutant: Mutant) -> Outcome:
    for case, values in zip(trial.cases, expected, strict=True):
        report, outputs = trial.run(case, mutant)
        name = schedule_name(*case.schedule)
        if not report.clean:
            return Outcome(mutant, True, str(report.findings[0]) if report.findings else "stopped", name)
        if not trial.same(outputs, values):
            return Outcome(mutant, True, "other values", name)
    return Outcome(mutant, False, "", "")


STRESS = [(mode, order, seed) for mode in ASYNC_MODES for order in ORDERS for seed in range(3)]


def _agrees(trial: _Trial, mutant: Mutant) -> bool:
    """Whether values alone, with the detector off, are the kernel's own under every schedule there is, thrice."""
    for make in {case.arguments for case in trial.cases}:
        for schedule in STRESS:
            case = Case(make, schedule)
            values, broken = (trial.run(case, *on, detect=False)[1] for on in ((), (mutant,)))
            if not trial.same(broken, values):
                return False
    return True


NEAREST = 8  # mutants that pairs are made of: what does another's work is near it


class _Covering:
    """Looks for covers of survivors: one other mutant, then two, then all of a kind."""

    def __init__(self, trial: _Trial):
        self.trial = trial
        self._known: dict[tuple[int, ...], dict[object, str]] = {}

    def of(self, survivor: Mutant) -> Cover | None:
        for others in self._candidates(survivor):
            without = self._findings(*others)
            added = [text for key, text in self._findings(*others, survivor).items() if key not in without]
            if added:
                return Cover(others, added[0])
        return None

    def _candidates(self, survivor: Mutant) -> Iterable[tuple[Mutant, ...]]:
        others = [m for m in self.trial.mutants if m.line != survivor.line and m.kind != "guard"]
        others.sort(key=lambda other: abs(other.line - survivor.line))
        alike = [other for other in others if other.kind == survivor.kind]
        yield from ((other,) for other in alike)
        yield from itertools.combinations(alike[:NEAREST], 2)
        yield tuple(alike)
        yield from ((other,) for other in others if other.kind != survivor.kind)

    def _findings(self, *on: Mutant) -> dict[object, str]:
        """What is found with these switched on, by kind and lines."""
        key = tuple(sorted(mutant.number for mutant in on))
        if key not in self._known:
            found: dict[object, str] = {}
            for case in self.trial.cases:
                if case.schedule not in SCHEDULES[:2]:
                    continue
                report, _ = self.trial.run(case, *on)
                for finding in report.findings:
                    lines = (finding.place.line, finding.other_place.line)
                    found.setdefault((finding.kind, *lines), f"{finding.kind} at line {lines[0]}")
            self._known[key] = found
        return self._known[key]
