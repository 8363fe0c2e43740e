"""What can compute an op, in which order, and why the others cannot."""

import importlib
import logging
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from autotune.build import BuildError
from linattn_tl import devices, repeats, settings
from tl_kernels.spec import Kernel, Problem, Target

log = logging.getLogger("linattn_tl")
COMPILED = ("binary", "jit")
COUNTERS = ("compile", "tune", "binary_load", "fallback")


@dataclass(frozen=True)
class Impl:
    """One way to compute an op.

    refuse(problem) returns None if it can serve the problem, else the reason in words; it imports nothing heavy, but
    for CuPy, which alone can say whether it works, and is asked for CUDA tensors only.
    load(problem) returns the object whose forward (and backward) computes; it may build.
    """

    backend: str
    refuse: Callable[[Problem], str | None]
    load: Callable[[Problem], Any]


@dataclass(frozen=True)
class Compiled:
    """The kernels that serve an op on one type of device, how a runner is made of them, and how they are tried.

    A launcher is a loaded kernel: a CpuBinary, or a Launcher of linattn_tl.launchers.
    """

    kernels: tuple[Kernel, ...]
    runner: Callable[[Mapping[str, Any], Target], Any]  # {kernel name: launcher}, device -> the runner
    trial_module: str  # with check(kernel, problem, launcher, ...) and workload(kernel, problem, launcher, ...)
    refuse: Callable[[Problem], str | None] = lambda problem: None  # what none of the kernels can do
    needed: Callable[[Problem, Target], tuple[Kernel, ...]] | None = None  # where it is not all of them

    @property
    def trial(self) -> Any:
        """The module that tries the kernels; imported when asked for, since serving needs none."""
        return importlib.import_module(self.trial_module)

    def serving(self, problem: Problem, device: Target) -> tuple[Kernel, ...]:
        """The kernels without which the problem cannot be served on a device."""
        return self.kernels if self.needed is None else self.needed(problem, device)


@dataclass(frozen=True)
class Op:
    """A public op and everything the house needs to serve, check, tune and time it."""

    name: str
    call: Callable[..., Any]  # the public function
    bind: Callable[..., Problem]  # the public function's arguments -> Problem, after all checks
    impls: tuple[Impl, ...]  # preferred first; the torch one last
    compiled: Mapping[str, Compiled]  # by device type
    autograd: Any = None  # Autograd below, or None for an op without gradients
    forms: Mapping[str, Callable[..., Problem]] = field(default_factory=dict)  # other public functions that call it:
    # by name, how `bind` would take their arguments


@dataclass(frozen=True)
class Autograd:
    """What apply.py needs to know of a differentiable op."""

    inputs: tuple[str, ...]  # the differentiable tensors, in order
    required: frozenset[str]  # those that are never None
    outputs: tuple[str, ...]  # what forward returns
    saved: tuple[str, ...]  # what every runner keeps for backward besides the inputs; a library op hands on no more
    options: type  # a NamedTuple class of plain arguments
    problem: Callable[..., Problem]  # inputs -> Problem
    check_values: Callable[..., None]  # (inputs, lengths, name): checks that read values: not possible while tracing
    meta: Callable[..., Any]  # (inputs, lengths, options) -> empty outputs and saved, or None for each
    wanted: Callable[..., tuple[bool, ...]]  # options -> which outputs are not None
    reference: Any  # the runner in plain torch, differentiable any number of times


@dataclass(frozen=True)
class Choice:
    backend: str
    runner: Any


class UnsupportedError(RuntimeError):
    """No implementation of the op can serve the call, or the named one cannot."""


@dataclass
class _State:
    chosen: dict[tuple[Problem, str], Choice] = field(default_factory=dict)
    said: set[tuple[str, str]] = field(default_factory=set)
    counters: Counter = field(default_factory=Counter)


_state = _State()


def count(event: str) -> None:
    _state.counters[event] += 1


def stats() -> dict[str, int]:
    """How often this process compiled, tuned, loaded a binary, and fell back to a slower backend."""
    return {name: _state.counters[name] for name in COUNTERS}


def last_backend(op: str) -> str | None:
    """The backend that served the last call of op, or None before the first.

    Forms of an op (retention, ssd) come down to calls of it, and have its last one.
    """
    return repeats.last_backend.get(named(op)[0].name)


def note_backend(op: str, backend: str) -> None:
    repeats.last_backend[op] = backend


def forget_choices() -> None:
    """Choose anew on the next call: after binaries were added, or the settings changed."""
    _state.chosen.clear()
    _state.said.clear()
    repeats.forget()


def choose(op: Op, problem: Problem, backend: str = "auto") -> Choice:
    """The first implementation that serves the problem, remembered. A named backend never falls back."""
    key = (problem, backend)
    choice = _state.chosen.get(key)
    if choice is None:
        named = settings.default_backend() if backend == "auto" else backend
        choice = _state.chosen[key] = _choose(op, problem, named)
    return choice


def _choose(op: Op, problem: Problem, backend: str) -> Choice:
    known = [impl.backend for impl in op.impls]
    if backend != "auto" and backend not in known:
        raise ValueError(f"{op.name}: backend is {backend!r}; expected one of auto, {', '.join(known)}")
    reasons = []
    for impl in op.impls:
        if backend not in ("auto", impl.backend):
            continue
        reason = impl.refuse(problem)
        if reason is None:
            _check_no_capture(op, impl, problem)
            try:
                choice = Choice(impl.backend, impl.load(problem))
            except BuildError as error:
                reason = str(error)
            else:
                if backend == "auto" and impl.backend not in COMPILED:
                    fall_back(op.name, impl.backend, "; ".join(reasons))
                return choice
        reasons.append(f"{impl.backend}: {reason}")
    raise UnsupportedError(f"{op.name}: no backend can serve {problem}: " + "; ".join(reasons))


def _check_no_capture(op: Op, impl: Impl, problem: Problem) -> None:
    """Loading allocates and waits for the device, which would spoil a graph that is being captured."""
    if impl.backend != "torch" and devices.capturing(problem):
        p = problem
        raise UnsupportedError(
            f"{op.name}: the first call for {p.dtype} K={p.K} V={p.V} came while a CUDA graph was captured; expected "
            f"linattn_tl.preload({op.name.removesuffix('_decode')!r}, K={p.K}, V={p.V}, ...) or a call before that"
        )


def fall_back(op: str, backend: str, why: str) -> None:
    """Count a fallback, say it once for each (op, reason), and refuse it in strict mode."""
    if settings.strict():
        raise UnsupportedError(f"{op}: LINATTN_TL_STRICT=1 and only {backend} can serve this call: {why}")
    count("fallback")
    if (op, why) in _state.said:
        return
    _state.said.add((op, why))
    log.warning("%s: served by the %s backend, several times slower than a compiled kernel. %s", op, backend, why)


@dataclass(frozen=True)
class Explanation:
    """Which backend would serve a call, and why each other one would not or need not."""

    op: str
    problem: Problem
    backend: str | None
    rows: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        p = self.problem
        head = f"{self.op}  {p.dtype}  K={p.K} V={p.V}  {p.device}: {self.backend or 'nothing'} serves this call"
        return "\n".join([head, *(f"  {name:<8}{text}" for name, text in self.rows)])


def explain_problem(op: Op, problem: Problem, backend: str = "auto") -> Explanation:
    backend = settings.default_backend() if backend == "auto" else backend
    rows, served = [], None
    for impl in op.impls:
        reason = impl.refuse(problem)
        if backend not in ("auto", impl.backend):
            rows.append((impl.backend, f"not asked: backend={backend!r}"))
        elif reason is not None:
            rows.append((impl.backend, f"cannot: {reason}"))
        elif served is None:
            served = impl.backend
            rows.append((impl.backend, "serves this call"))
        else:
            rows.append((impl.backend, f"could, after {served}"))
    return Explanation(op.name, problem, served, tuple(rows))


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which backend would serve op(*args, **kwargs), and for every other one the reason why not. Runs nothing."""
    found, bind = named(op if isinstance(op, str) else op.__name__)
    return explain_problem(found, bind(*args, **kwargs), kwargs.get("backend", "auto"))


@cache
def all_ops() -> dict[str, Op]:
    """Every op of every module in linattn_tl.ops, found by listing the folder."""
    package = importlib.import_module("linattn_tl.ops")
    ops: dict[str, Op] = {}
    for module in pkgutil.iter_modules(package.__path__):
        for op in importlib.import_module(f"linattn_tl.ops.{module.name}").OPS:
            if op.name in ops:
                raise ValueError(f"op {op.name!r} is defined twice")
            ops[op.name] = op
    return ops


def get_op(name: str) -> Op:
    try:
        return all_ops()[name]
    except KeyError:
        raise ValueError(f"op is {name!r}; expected one of {', '.join(all_ops())}") from None


def named(name: str) -> tuple[Op, Callable[..., Problem]]:
    """The op that a public function comes down to, and what binds the function's arguments."""
    for op in all_ops().values():
        if name == op.name or name in op.forms:
            return op, op.forms.get(name, op.bind)
    known = [x for op in all_ops().values() for x in (op.name, *op.forms)]
    raise ValueError(f"op is {name!r}; expected one of {', '.join(known)}")
