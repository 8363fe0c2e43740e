"""Running a lowered kernel on the CPU: `emulate(prim_func, arch)` gives a callable that returns reports."""

import ctypes
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from autotune.emulator.arguments import Call, Tensor, prepare
from autotune.emulator.builder import Built, build
from autotune.emulator.errors import EmulatorError
from autotune.emulator.lowering import SHARED_LIMIT, Lowered, has_byte_elements, lower
from autotune.emulator.places import Place, resolve
from autotune.emulator.report import Finding, Report, merge, parse, pcs_of

ASYNC_MODES = ("late", "early", "random")  # numbered as the runtime numbers them
ORDERS = ("ascending", "descending", "shuffled", "greedy", "greedy-descending")
SCHEDULES = (  # (async_mode, order, seed): what `check` runs; each has shown faults that the others did not
    ("late", "ascending", 0),
    ("early", "greedy", 0),
    ("random", "shuffled", 1),
    ("random", "shuffled", 2),
)
_running = threading.Lock()  # a library has one launch's state, and callers may have threads


class _Settings(ctypes.Structure):
    """`struct Settings` of runtime/runtime.h."""

    _fields_ = [
        *(
            (name, ctypes.c_int)
            for name in ("detect", "count", "async_mode", "order", "seed", "granule", "max_findings", "shared_limit")
        ),
        ("max_seconds", ctypes.c_double),
    ]


def default_cache() -> Path:
    """Where built kernels are kept when the caller names no folder."""
    return Path.home() / ".cache" / "linattn_tl" / "emulator"


def emulate(
    func: Any,
    arch: str,
    pass_configs: dict[str, Any] | None = None,
    *,
    cache: str | Path | None = None,
    edit: Callable[[str], str] | None = None,
) -> "Emulated":
    """Lower a prim_func for an architecture and build it for the CPU.

    Args:
        func: a `T.prim_func`.
        arch: sm_80, sm_86, sm_89, sm_90a, sm_100a or sm_120a.
        pass_configs: TileLang's own, such as {"tl.disable_tma_lower": True}.
        cache: folder for built kernels; `default_cache()` without one.
        edit: what to make of the emitted source before it is built, to try a change by hand or to break a kernel.

    Returns:
        A callable: `report = k(*tensors)`.

    Raises:
        TypeError, ValueError: func is not a prim_func; the architecture is unknown.
        EmulatorError: the kernel cannot be lowered or built, or uses an instruction that is not emulated.
    """
    lowered = lower(func, arch, pass_configs)
    if edit is not None:
        lowered = dataclasses.replace(lowered, source=edit(lowered.source))
    return Emulated(lowered, cache=cache)


class Emulated:
    """A kernel built for the CPU. Building it again is quick: every step of it is cached by content.

    Arguments are the prim_func's, in its order: torch CPU tensors or numpy arrays, contiguous; int or float scalars.
    Dynamic sizes are taken from the shapes. The kernel works on copies aligned to 256 bytes, as device memory is, and
    results are copied back, except to arguments that are read-only.
    """

    def __init__(self, lowered: Lowered, *, cache: str | Path | None = None) -> None:
        start = time.perf_counter()
        self.lowered = lowered
        self.built: Built = build(lowered.source, default_cache() if cache is None else Path(cache))
        try:
            self.library = ctypes.CDLL(str(self.built.path))
        except OSError as error:
            raise EmulatorError(f"{lowered.name}: the built kernel cannot be loaded: {error}") from None
        self.library.emu_results.restype = ctypes.c_char_p
        self.library.get_last_error.restype = ctypes.c_char_p
        self._settings = _Settings.in_dll(self.library, "emu_settings")
        # bytes of a shadow cell: the smallest element there is
        self._granule = 1 if has_byte_elements(lowered.kernel_source) else 2
        self._places: dict[int, Place] = {}  # what addr2line said before
        self.build_seconds = time.perf_counter() - start

    @property
    def name(self) -> str:
        return self.lowered.name

    @property
    def arch(self) -> str:
        return self.lowered.arch

    @property
    def source(self) -> str:
        """The emitted CUDA C++ with TileLang's host wrapper; findings name its lines."""
        return self.lowered.source

    @property
    def kernel_source(self) -> str:
        """The emitted device code alone, before any edit."""
        return self.lowered.kernel_source

    @property
    def lower_seconds(self) -> float:
        return self.lowered.seconds

    def __call__(
        self,
        *tensors: Any,
        readonly: Sequence[str | int] | None = None,
        async_mode: str = "late",
        order: str = "ascending",
        seed: int = 0,
        detect: bool = True,
        count: bool = True,
        max_findings: int = 50,
        max_seconds: float = 120.0,
        in_place: bool = False,
    ) -> Report:
        """Run once.

        Args:
            tensors: the arguments of the prim_func, in its order.
            readonly: names or indices of the arguments that must not be written; by default those that the emitted
                code declares const.
            async_mode: when the bytes of an asynchronous copy land: "late" is at its wait, "early" at issue.
            order: in which threads run: "ascending", "descending" or "shuffled" in turns, "greedy" or
                "greedy-descending" each as far ahead as it gets.
            seed: of "random" and "shuffled".
            detect: check for races, uninitialised reads and missing fences. Bounds are checked always.
            count: count memory traffic and instructions.
            max_findings: kept; later ones are dropped.
            max_seconds: after which the launch is ended with a finding.
            in_place: work on the arguments' own memory, each at a multiple of 256 bytes: for buffers of gigabytes of
                which the kernel touches little. With a finding, what they hold is not defined.

        Raises:
            TypeError, ValueError: an argument is not what the kernel takes; nothing has run.
            EmulatorError: the host wrapper refused to launch.
        """
        settings = {
            "detect": int(detect),
            "count": int(count),
            "async_mode": _number("async_mode", async_mode, ASYNC_MODES),
            "order": _number("order", order, ORDERS),
            "seed": seed,
            "max_findings": max_findings,
            "max_seconds": max_seconds,
        }
        call = prepare(self.lowered, tensors, readonly, in_place)
        report = self._run(call, settings, schedule_name(async_mode, order, seed))
        for tensor in call.tensors:
            tensor.copy_back()
        return report

    def check(
        self,
        *tensors: Any,
        readonly: Sequence[str | int] | None = None,
        tolerance: float | Mapping[str, float] = 1e-5,
        schedules: Sequence[tuple[str, str, int]] = SCHEDULES,
        **settings: Any,
    ) -> Report:
        """Run every schedule on the same inputs and compare the results; the first one's are copied back.

        A result that depends on the schedule is a finding of kind "schedule". Results are compared bit by bit, except
        for arguments that the kernel updates atomically, in no fixed order.

        Args:
            tolerance: how far results of atomic updates may differ, relative to the largest value of the argument; or
                such tolerances by name of the argument, for those and no others.
            schedules: (async_mode, order, seed) of each run.
            settings: detect, count, max_findings and max_seconds, as for a single run.

        Returns:
            One report: all findings, counters of the first schedule.
        """
        if unknown := settings.keys() - _DEFAULTS.keys():
            raise TypeError(f"check got {min(unknown)}; expected {', '.join(_DEFAULTS)}")
        if not isinstance(tolerance, Mapping):
            tolerance = {p.name: tolerance for p in self.lowered.parameters if p.atomic}
        first: Call | None = None
        reports: list[Report] = []
        differ: dict[str, Finding] = {}  # by argument, the first schedule that gave another result
        for async_mode, order, seed in schedules:
            how = {
                "async_mode": _number("async_mode", async_mode, ASYNC_MODES),
                "order": _number("order", order, ORDERS),
                "seed": seed,
            }
            call = prepare(self.lowered, tensors, readonly)
            report = self._run(call, {**_DEFAULTS, **settings, **how}, schedule_name(async_mode, order, seed))
            reports.append(report)
            if first is None:
                first = call
            elif not (report.stopped or reports[0].stopped):  # else both are incomplete
                names = (reports[0].schedules[0], report.schedules[0])
                found = _differences(self.name, first.tensors, call.tensors, names, tolerance)
                differ = {**found, **differ}
        if first is None:
            raise ValueError(f"{self.name}: check needs at least one schedule")
        for tensor in first.tensors:
            tensor.copy_back()
        merged = merge(reports)
        merged.findings += differ.values()
        return merged

    def _run(self, call: Call, settings: Mapping[str, Any], schedule: str) -> Report:
        if settings["max_findings"] < 1:  # a report without findings would look clean
            raise ValueError(f"{self.name}: max_findings is {settings['max_findings']}; expected 1 or more")
        library = self.library
        with _running:
            for name, value in settings.items():
                setattr(self._settings, name, value)
            self._settings.granule = self._granule
            self._settings.shared_limit = SHARED_LIMIT[self.arch]
            library.emu_reset()
            for tensor in call.tensors:
                library.emu_add_buffer(
                    ctypes.c_void_p(tensor.staged),
                    ctypes.c_size_t(tensor.bytes),
                    int(tensor.readonly),
                    tensor.parameter.name.encode(),
                )
            start = time.perf_counter()
            failed = library.init() or library.call(*call.values)
            seconds = time.perf_counter() - start
            results = json.loads(library.emu_results().decode(errors="replace"))
            if failed and not results["findings"]:
                reason = library.get_last_error().decode(errors="replace") or "the host wrapper did not say why"
                raise EmulatorError(f"{self.name}: it was not launched: {reason}")
        self._places |= resolve(self.built.path, pcs_of(results) - self._places.keys(), self.source)
        return parse(
            results,
            self._places,
            kernel=self.name,
            arch=self.arch,
            schedule=schedule,
            seconds=seconds,
            sizes=call.sizes,
        )


_DEFAULTS = {"detect": 1, "count": 1, "max_findings": 50, "max_seconds": 120.0}


def schedule_name(async_mode: str, order: str, seed: int) -> str:
    seeded = async_mode == "random" or order == "shuffled"
    return f"{async_mode}, {order}" + (f", seed {seed}" if seeded else "")


def _number(name: str, value: str, known: tuple[str, ...]) -> int:
    if value not in known:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(known)}")
    return known.index(value)


def _differences(
    kernel: str,
    first: list[Tensor],
    second: list[Tensor],
    names: tuple[str, str],
    tolerance: Mapping[str, float],
) -> dict[str, Finding]:
    """By argument, a finding for each result that two schedules do not agree on."""
    found = {}
    for one, other in zip(first, second, strict=True):
        name = one.parameter.name
        differ = differing(one.data(), other.data(), tolerance.get(name, 0.0))
        if one.readonly or not differ.any():
            continue
        where = tuple(int(i) for i in differ.nonzero()[0])
        values = [t.data()[where].item() for t in (one, other)]
        message = (
            f"{name} depends on the schedule: {int(differ.sum())} of {differ.numel()} elements; the first is "
            f"{name}{list(where)}, {values[0]:.9g} under ({names[0]}) and {values[1]:.9g} under ({names[1]})"
        )
        found[name] = Finding("schedule", message, kernel, schedule=names[1])
    return found


def differing(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Where two results differ: in any bit, or with a tolerance by more than it times the largest finite value."""
    if not tolerance:
        size = one.element_size()
        bytes_of = [t.reshape(-1).view(torch.uint8).reshape(*t.shape, size) for t in (one, other)]
        return (bytes_of[0] != bytes_of[1]).any(-1)
    a, b = one.double(), other.double()
    finite = a[a.isfinite()]
    allowed = tolerance * (float(finite.abs().max()) if finite.numel() else 0.0)
    same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= allowed)
    return ~same
