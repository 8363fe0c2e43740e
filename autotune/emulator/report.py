"""What a run of a kernel found and counted, by line of the generated source."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.emulator.places import NOWHERE, Place

Index = tuple[int, int, int]


class NotCleanError(AssertionError):
    """A kernel's run was not clean; the text is the whole report."""


@dataclass(frozen=True)
class Finding:
    """Something wrong, once for each pair of places, with how often it happened."""

    kind: str  # race, uninitialised, out_of_bounds, read_only, proxy, in_flight, divergence, barrier, deadlock, ...
    message: str
    kernel: str = ""
    block: Index = (0, 0, 0)
    thread: int = -1  # -1: none in particular
    place: Place = NOWHERE
    other_block: Index = (0, 0, 0)
    other_thread: int = -1
    other_place: Place = NOWHERE
    count: int = 1
    schedule: str = ""  # the first one that showed it

    def __str__(self) -> str:
        parts = [f"{self.kind}: {self._sentence()}"]
        if self.thread >= 0:
            parts.append(f"block {show_index(self.block)}")
        if self.count > 1:
            parts.append(f"{self.count} times")
        return ", ".join(parts)

    def _sentence(self) -> str:
        """The message with both parties put where they belong."""
        here = f"by {_party(self.thread, self.place)}" if self.thread >= 0 else f"at {self.place}"
        head, joint, tail = self.message.partition(" after ")
        if self.other_place == NOWHERE and self.other_thread < 0:
            known = self.thread >= 0 or self.place != NOWHERE
            return f"{self.message}, {here}" if known else self.message
        there = _party(self.other_thread, self.other_place)
        if self.other_block != self.block:
            there += f" of block {show_index(self.other_block)}"
        if joint:
            return f"{head} {here} after {tail} by {there}"
        return f"{self.message}, {here}; the other side is {there}"


def _party(thread: int, place: Place) -> str:
    if thread < 0:
        return f"the code at {place}"
    return f"thread {thread}" if place == NOWHERE else f"thread {thread} ({place})"


def show_index(index: Index) -> str:
    return "({},{},{})".format(*index)


@dataclass(frozen=True)
class Wait:
    """Threads that waited in one place when nothing could run any more."""

    threads: str  # "0-31,64-95"
    waits_in: str  # "bar.sync 1: 96 of 128 arrived"
    place: Place = NOWHERE

    def __str__(self) -> str:
        return f"threads {self.threads} wait in {self.waits_in} ({self.place})"


@dataclass
class Site:
    """Counters of one source line."""

    place: Place = NOWHERE
    global_read: int = 0  # bytes
    global_written: int = 0
    global_requests: int = 0  # of a warp; a bulk transfer counts each contiguous run
    sectors: int = 0  # of 32 bytes, touched by those requests
    ideal_sectors: int = 0  # the fewest that could hold the bytes
    shared_read: int = 0
    shared_written: int = 0
    shared_requests: int = 0
    wavefronts: int = 0  # passes over the banks
    ideal_wavefronts: int = 0
    flops: dict[str, float] = field(default_factory=dict)  # by matrix instruction
    waits: dict[str, int] = field(default_factory=dict)  # executions of barriers, waits and fences

    @property
    def global_bytes(self) -> int:
        return self.global_read + self.global_written

    @property
    def shared_bytes(self) -> int:
        return self.shared_read + self.shared_written

    @property
    def wasted_sectors(self) -> int:
        return self.sectors - self.ideal_sectors

    @property
    def sector_ratio(self) -> float:
        """Sectors for each that was needed; 1 is perfectly coalesced."""
        return _ratio(self.sectors, self.ideal_sectors)

    @property
    def wasted_wavefronts(self) -> int:
        return self.wavefronts - self.ideal_wavefronts

    @property
    def conflict_degree(self) -> float:
        """Passes over the banks for each that was needed; 1 is free of conflicts."""
        return _ratio(self.wavefronts, self.ideal_wavefronts)

    def add(self, other: "Site") -> None:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, flops in other.flops.items():
            self.flops[name] = self.flops.get(name, 0.0) + flops
        for name, count in other.waits.items():
            self.waits[name] = self.waits.get(name, 0) + count


_COUNTS = tuple(f.name for f in dataclasses.fields(Site) if f.type in (int, "int"))


def _ratio(value: float, floor: float) -> float:
    return value / floor if floor else 1.0


@dataclass(frozen=True)
class Buffer:
    """Traffic of one tensor argument, in bytes."""

    name: str
    bytes: int
    read: int = 0
    written: int = 0
    unique_read: int = 0  # distinct bytes: the floor, were each moved once
    unique_written: int = 0


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    kernel: str
    grid: Index
    block: Index
    shared_bytes: int

    def __str__(self) -> str:
        grid, block = (show_index(i) for i in (self.grid, self.block))
        return f"{self.kernel} grid {grid} block {block} shared {self.shared_bytes} B"


@dataclass(frozen=True)
class Counters:
    """Totals of a run."""

    total: Site  # summed over all lines
    blocks: int
    unique_read: int
    unique_written: int
    peak_async_bytes: int  # asynchronous copies in flight at once, in one block

    @property
    def global_bytes(self) -> int:
        return self.total.global_bytes

    @property
    def unique_bytes(self) -> int:
        return self.unique_read + self.unique_written

    @property
    def traffic_ratio(self) -> float:
        """Bytes moved for each distinct byte; what caches or another tiling could save."""
        return _ratio(self.global_bytes, self.unique_bytes)

    @property
    def flops(self) -> dict[str, float]:
        return dict(self.total.flops)

    @property
    def waits_per_block(self) -> dict[str, float]:
        return {name: count / max(self.blocks, 1) for name, count in self.total.waits.items()}

    def to_dict(self) -> dict[str, Any]:
        total = {k: v for k, v in dataclasses.asdict(self.total).items() if k not in ("place", "waits")}
        return {
            **total,
            "sector_ratio": self.total.sector_ratio,
            "conflict_degree": self.total.conflict_degree,
            "unique_read": self.unique_read,
            "unique_written": self.unique_written,
            "traffic_ratio": self.traffic_ratio,
            "waits_per_block": self.waits_per_block,
            "peak_async_bytes": self.peak_async_bytes,
            "blocks": self.blocks,
        }


@dataclass
class Report:
    """One run, or several schedules of one launch. `print(report)` shows it on one screen.

    `by_line()` has the counters of each source line, `counters` their totals, `buffers` the traffic of each argument.
    """

    kernel: str
    arch: str
    schedules: list[str]
    findings: list[Finding]
    waits: list[Wait]  # filled after a deadlock
    stopped: bool  # the launch ended early, after a finding or for want of time
    launches: list[Launch]
    buffers: list[Buffer]
    sites: list[Site]  # one a line, in the order of the source
    blocks: int = 0
    switches: int = 0  # of threads
    peak_async_bytes: int = 0
    seconds: float = 0.0
    sizes: dict[str, int] = field(default_factory=dict)  # of the dynamic symbols

    @property
    def clean(self) -> bool:
        """The launch ran to its end and nothing was found."""
        return not self.findings and not self.stopped

    def assert_clean(self) -> "Report":
        """Raise NotCleanError, an AssertionError, with the whole report as its text; else return the report."""
        if not self.clean:
            raise NotCleanError(str(self))
        return self

    @property
    def counters(self) -> Counters:
        total = Site()
        for site in self.sites:
            total.add(site)
        read, written = (sum(getattr(b, n) for b in self.buffers) for n in ("unique_read", "unique_written"))
        return Counters(total, self.blocks, read, written, self.peak_async_bytes)

    def by_line(self, worst: str = "global") -> list[Site]:
        """Lines with traffic, worst first: "global" by sectors wasted, "shared" by bank conflicts; then by bytes."""
        keys: dict[str, Callable[[Site], tuple[int, int]]] = {
            "global": lambda s: (s.wasted_sectors, s.global_bytes),
            "shared": lambda s: (s.wasted_wavefronts, s.shared_bytes),
        }
        if worst not in keys:
            raise ValueError(f"by_line: worst is {worst!r}; expected 'global' or 'shared'")
        key = keys[worst]
        return sorted((s for s in self.sites if key(s)[1]), key=key, reverse=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dictionaries."""
        return {"clean": self.clean, **dataclasses.asdict(self), "counters": self.counters.to_dict()}

    def as_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        from autotune.emulator.screen import render

        return render(self)


def merge(reports: Sequence[Report]) -> Report:
    """One report of several schedules: every finding once, counters of the first schedule, the highest peak."""
    return dataclasses.replace(
        reports[0],
        schedules=[name for report in reports for name in report.schedules],
        findings=_merged_findings(f for report in reports for f in report.findings),
        waits=next((r.waits for r in reports if r.waits), []),
        stopped=any(r.stopped for r in reports),
        peak_async_bytes=max(r.peak_async_bytes for r in reports),
        seconds=sum(r.seconds for r in reports),
    )


def _merged_findings(findings: Iterable[Finding]) -> list[Finding]:
    """One for each kind and pair of lines: a line has several accesses, and an address differs from run to run."""
    merged: dict[tuple[Any, ...], Finding] = {}
    for finding in findings:
        lines = tuple(p.line or p.offset for p in (finding.place, finding.other_place))
        key = (finding.kind, lines if any(lines) else finding.message)
        if key in merged:
            finding = dataclasses.replace(merged[key], count=merged[key].count + finding.count)
        merged[key] = finding
    return list(merged.values())


# ---- from the runtime's words


def parse(
    results: Mapping[str, Any],
    places: Mapping[int, Place],
    *,
    kernel: str = "",
    arch: str = "",
    schedule: str = "",
    seconds: float = 0.0,
    sizes: Mapping[str, int] | None = None,
) -> Report:
    """The report that the JSON of emu_results describes. `places` is resolve()'s; unknown pcs are kept as offsets."""

    def place(pc: int) -> Place:
        return places.get(pc, Place(offset=pc))

    return Report(
        kernel=kernel,
        arch=arch,
        schedules=[schedule],
        findings=_merged_findings(_finding(f, place, schedule) for f in results["findings"]),
        waits=[Wait(w["threads"], w["in"], place(w["pc"])) for w in results["waits"]],
        stopped=bool(results["stopped"]),
        launches=[
            Launch(x["kernel"], _index(x["grid"]), _index(x["block"]), x["shared_bytes"]) for x in results["launches"]
        ],
        buffers=[Buffer(**b) for b in results["buffers"]],
        sites=_merged_by_line(results["sites"], place),
        blocks=results["blocks"],
        switches=results["switches"],
        peak_async_bytes=results["peak_async_bytes"],
        seconds=seconds,
        sizes=dict(sizes or {}),
    )


def pcs_of(results: Mapping[str, Any]) -> set[int]:
    """Every code offset that the runtime's results name."""
    entries = [*results["findings"], *results["waits"], *results["sites"]]
    return {e[key] for e in entries for key in ("pc", "other_pc") if e.get(key)}


def _index(values: Iterable[int]) -> Index:
    x, y, z = values
    return x, y, z


def _finding(entry: Mapping[str, Any], place: Callable[[int], Place], schedule: str) -> Finding:
    return Finding(
        kind=entry["kind"],
        message=entry["message"],
        kernel=entry["kernel"],
        block=_index(entry["block"]),
        thread=entry["thread"],
        place=place(entry["pc"]),
        other_block=_index(entry["other_block"]),
        other_thread=entry["other_thread"],
        other_place=place(entry["other_pc"]),
        count=entry["count"],
        schedule=schedule,
    )


def _merged_by_line(entries: Iterable[Mapping[str, Any]], place: Callable[[int], Place]) -> list[Site]:
    """The compiler makes several accesses of one line; they are one site. Lines that are unknown stay apart."""
    lines: dict[tuple[int, int], Site] = {}
    for entry in entries:
        values = {k: v for k, v in entry.items() if k != "pc"}
        site = Site(place=place(entry["pc"]), **values)
        key = (site.place.line, 0 if site.place.line else site.place.offset)
        if key not in lines:
            lines[key] = Site(place=site.place)
        elif lines[key].place.inner != site.place.inner:
            lines[key].place = dataclasses.replace(lines[key].place, inner="")
        lines[key].add(site)
    return [lines[key] for key in sorted(lines)]
