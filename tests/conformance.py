"""Every op x backend x case against the definition, token by token in float64.

A family adds rows and nothing else: tests/ops/<family>.py has SUBJECTS, one a public op, each with its cases. The
cases that every family shares are `sequence_cases` and `decode_cases` here.
"""

import importlib
import pkgutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from autotune import target
from autotune.verify import check_close, relative_rms
from linattn_tl import registry, tuning
from tl_kernels.spec import Problem

BACKENDS = ("binary", "jit", "torch")
COMPILED = ("binary", "jit")
DTYPES = ("float32", "bfloat16", "float16")  # what a compiled backend must serve
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Sizes, options and the shape of memory of one call."""

    id: str
    B: int = 2
    T: int = 33
    H: int = 2
    HV: int = 2
    K: int = 16
    V: int = 16
    T_k: int | None = None  # keys, where they differ in number from the queries
    cu: tuple[int, ...] | None = None
    state: bool = False  # an initial state is given
    final: bool = False  # the final state is asked for, and in the loss
    options: tuple[tuple[str, Any], ...] = ()  # keywords of the op
    dtype: str = "float32"
    layout: str = "contiguous"
    upstream: str = "dense"
    single: bool = False  # decode: [B, H, K] and not [B, n, H, K]
    slots: tuple[int, ...] | None = None  # decode: rows of the pool
    index: str = "int64"  # cu_seqlens and slots: their dtype, or "strided"
    backends: tuple[str, ...] = ("binary", "torch")

    @property
    def N(self) -> int:
        """Sequences."""
        return self.B if self.cu is None else len(self.cu) - 1

    @property
    def keywords(self) -> dict[str, Any]:
        return dict(self.options)


@dataclass(frozen=True)
class Subject:
    """A public op under test."""

    op: str
    inputs: Callable[[Case], Tensors]  # named tensors in the case's dtype; initial states only if case.state
    call: Callable[[Tensors, Case, str], Tensors]  # tensors, case, backend -> named outputs
    truth: Callable[[Tensors, Case], Tensors]  # the same by the definition, in the tensors' dtype
    cases: tuple[Case, ...]
    tokens: tuple[str, ...] = ("q", "k", "v")
    states: tuple[str, ...] = ()  # names of the state: inputs before, outputs after
    differentiable: bool = True
    step: Callable[[Tensors, Tensors, Case, str], torch.Tensor] | None = None  # decode of one token, in place
    chunked: Callable[[Tensors, Case], Tensors] | None = None  # as truth by the plain chunk form, where that is less
    # exact than the recurrence whoever computes it


@cache
def subjects() -> dict[str, Subject]:
    """The rows of every family."""
    package = importlib.import_module("tests.ops")
    modules = [importlib.import_module(f"tests.ops.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    return {s.op: s for m in modules for s in getattr(m, "SUBJECTS", ())}


def sequences() -> list[Subject]:
    return [s for s in subjects().values() if s.differentiable]


def build_binaries() -> None:
    """Compile what the cache lacks: a process a core, then through the public calls, which say what went wrong."""
    ops = registry.all_ops().values()
    missing = [op.name for op in ops for d in DTYPES if op.impls[0].refuse(Problem(op.name, d, 16, 16))]
    device = target.native()
    if missing and device is not None:
        tuning.build_best([device.arch], DTYPES)
    for subject in subjects().values():
        for dtype in DTYPES:
            case = Case("build", dtype=dtype)
            subject.call(subject.inputs(case), case, "jit")


# ---- cases that all families share

LAYOUTS = ("fused", "heads-first", "column", "expanded", "every-second", "negated")


def sequence_cases() -> tuple[Case, ...]:
    lengths = [Case(f"T{t}", B=1, T=t, state=True, final=True) for t in (0, 1, 31, 32, 33, 63, 64, 65)]
    packed = {
        "packed": (0, 7, 71, 72, 172),
        "packed-empty-inside": (0, 5, 5, 40),
        "packed-empty-first": (0, 0, 33),
        "packed-empty-last": (0, 33, 33),
        "packed-all-empty": (0, 0, 0),
        "packed-nothing": (0,),
    }
    layouts = LAYOUTS
    upstreams = ("sum", "column", "heads-first", "outputs-only", "state-only")
    return (
        *(replace(c, backends=BACKENDS) for c in lengths),
        Case("T1000", B=1, T=1000, backends=BACKENDS),
        Case("T1000-state", T=1000, H=1, HV=1, state=True, final=True),
        # enough work for one head that time itself is cut into segments
        Case("one-head", B=1, T=1100, H=1, HV=1, K=64, V=64, state=True, final=True),
        Case("one-head-plain", B=1, T=1100, H=1, HV=1, K=64, V=64),
        Case("one-head-packed", B=1, T=1100, H=1, HV=2, K=64, V=64, cu=(0, 1100), state=True, final=True),
        Case("B0", B=0, final=True),
        Case("HV-more", H=2, HV=6, state=True, final=True),
        Case("K-more", K=32, V=16, state=True, final=True),
        Case("V-more", K=16, V=48, HV=4, final=True),
        Case("K-odd", K=7, V=19, state=True, final=True),
        *(Case(i, B=1, T=cu[-1], cu=cu, state=True, final=True, HV=4) for i, cu in packed.items()),
        Case("packed-no-state", B=1, T=70, cu=(0, 33, 70)),
        *(Case(f"packed-{i}", B=1, T=70, cu=(0, 33, 33, 70), index=i) for i in ("int32", "strided")),
        *(Case(f"layout-{w}", layout=w, state=True, final=True, HV=4, V=24) for w in layouts),
        *(Case(f"upstream-{u}", upstream=u, state=True, final=True, HV=4) for u in upstreams),
        *(Case(d, T=70, dtype=d, state=True, final=True, HV=4, backends=BACKENDS) for d in DTYPES),
        *(Case(f"{d}-T1000", B=1, T=1000, dtype=d) for d in DTYPES[1:]),
        *(Case(f"{d}-odd", K=7, V=19, dtype=d, state=True, final=True) for d in DTYPES[1:]),
        *(Case(f"{d}-wide", K=100, V=80, H=1, HV=1, dtype=d, state=True, final=True) for d in DTYPES[1:]),
        *(Case(f"{d}-widest", B=1, K=256, V=250, H=1, HV=1, dtype=d, state=True, final=True) for d in DTYPES[:2]),
        *(Case(f"{d}-packed", B=1, T=70, cu=(0, 33, 33, 70), dtype=d, final=True) for d in DTYPES[1:]),
        *(Case(f"{d}-fused", dtype=d, layout="fused", upstream="heads-first", V=24) for d in DTYPES[1:]),
        Case("float64", T=70, dtype="float64", state=True, final=True, HV=4, backends=("torch",)),
    )


def decode_cases() -> tuple[Case, ...]:
    tokens = [Case(f"n{n}", B=3, T=n, HV=4, V=24) for n in (0, 1, 3, 4, 5, 9)]
    layouts = LAYOUTS
    return (
        *(replace(c, backends=BACKENDS) for c in tokens),
        Case("single", B=3, T=1, single=True, HV=4, V=24, backends=BACKENDS),
        Case("B0", B=0, T=1),
        Case("K-odd", T=2, K=7, V=19),
        Case("K1-V1", T=2, K=1, V=1),
        Case("slots", B=3, T=2, HV=4, slots=(4, 0, 2)),
        Case("slots-padded", B=4, T=2, slots=(3, -1, 0, -1)),
        Case("slots-all-padding", B=2, T=1, slots=(-1, -1)),
        *(Case(f"slots-{i}", B=3, T=2, slots=(3, -1, 0), index=i) for i in ("int32", "strided")),
        *(Case(f"layout-{w}", T=3, layout=w, HV=4, V=24) for w in layouts),
        *(Case(f"{d}-{n}", B=3, T=n, dtype=d, HV=4, backends=BACKENDS) for d in DTYPES[1:] for n in (1, 6)),
        Case("float64", T=3, dtype="float64", backends=("torch",)),
    )


# ---- gates of those that have them

GATES = ("near", "strong", "kept", "forgotten", "mixed")  # of decays, as an option of a case


def gates(kind: str, shape: tuple[int, ...], g: torch.Generator) -> torch.Tensor:
    """Natural logarithms of decays."""
    mild = -(torch.rand(*shape, generator=g) ** 2)
    if kind == "strong":
        return torch.full(shape, -27.6)  # 1e-12 a token
    if kind == "kept":
        return torch.zeros(shape)
    if kind == "forgotten":
        return torch.full(shape, -torch.inf)
    if kind == "mixed":
        pick = torch.rand(*shape, generator=g)
        return mild.masked_fill(pick < 0.1, -torch.inf).masked_fill(pick > 0.9, 0.0).where(pick < 0.6, mild - 30)
    return mild


# ---- tensors of a case


def generator(case: Case, salt: str = "") -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{case.id}{salt}".encode()))


def index_of(case: Case, values: tuple[int, ...] | None) -> torch.Tensor | None:
    """cu_seqlens or slots as the case wants them."""
    if values is None:
        return None
    if case.index == "strided":
        return torch.tensor(values).repeat_interleave(2)[::2]
    return torch.tensor(values, dtype=getattr(torch, case.index))


def restate(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A state in another memory layout."""
    if layout == "heads-first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "column":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return x


def relayout(tensors: Tensors, names: tuple[str, ...], layout: str) -> Tensors:
    """The named tensors in another memory layout; "expanded" also changes values."""
    picked = {n: tensors[n] for n in names if n in tensors}
    if layout == "fused":  # chunks of one projection, as a model makes them
        flat = torch.cat([x.flatten(2) for x in picked.values()], -1)
        chunks = flat.split([x.flatten(2).shape[-1] for x in picked.values()], -1)
        picked = {n: c.unflatten(-1, x.shape[2:]) for (n, x), c in zip(picked.items(), chunks, strict=True)}
    elif layout == "heads-first":
        picked = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in picked.items()}
    elif layout == "column":
        picked = {n: x.transpose(1, -1).contiguous().transpose(1, -1) for n, x in picked.items()}
    elif layout == "expanded":  # stride 0 along another axis each
        picked = {n: x.narrow(i % 3, 0, 1).expand_as(x) for i, (n, x) in enumerate(picked.items())}
    elif layout == "negated":  # a view whose memory holds -x, as the imaginary part of a conjugate does
        picked = {n: torch.complex(x.float(), -x.float()).conj().imag.to(x.dtype) for n, x in picked.items()}
    elif layout == "every-second":
        picked = {
            n: torch.stack([x, torch.full_like(x, float("nan"))], 2).flatten(1, 2)[:, ::2] for n, x in picked.items()
        }
    return {**tensors, **picked}


def upstream_of(case: Case, name: str, x: torch.Tensor, subject: Subject) -> torch.Tensor | None:
    """The gradient that reaches an output, fp32 or wider values in the output's own dtype; None for none at all."""
    if case.upstream == ("outputs-only" if name in subject.states else "state-only"):
        return None
    if case.upstream == "sum":
        return torch.ones((), dtype=x.dtype).expand(x.shape)
    values = torch.randn(x.shape, generator=generator(case, name))
    if case.upstream in ("column", "heads-first") and values.ndim > 2:
        other = -1 if case.upstream == "column" else 2
        values = values.transpose(1, other).contiguous().transpose(1, other)
    return values.to(getattr(torch, case.dtype)).to(x.dtype)


def differentiate(subject: Subject, case: Case, outputs: Tensors, leaves: Tensors) -> dict[str, torch.Tensor | None]:
    """The gradient of every leaf from the case's upstream gradients."""
    pairs = [(x, upstream_of(case, n, x, subject)) for n, x in outputs.items()]
    pairs = [(x, g) for x, g in pairs if g is not None and x.requires_grad]
    if not pairs:
        return dict.fromkeys(leaves)
    found = torch.autograd.grad(
        [x for x, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True, retain_graph=True
    )
    return dict(zip(leaves, found, strict=True))


def tensors_of(subject: Subject, case: Case) -> Tensors:
    """Inputs in the case's layout, the same on every call; leaves of a graph where the op is differentiable."""
    tensors = relayout(subject.inputs(case), subject.tokens, case.layout)
    tensors = {n: restate(x, case.layout) if n in subject.states else x for n, x in tensors.items()}
    return {n: x.detach().requires_grad_(subject.differentiable) for n, x in tensors.items()}


@dataclass(frozen=True)
class Result:
    outputs: Tensors
    grads: dict[str, torch.Tensor | None]


def defined(subject: Subject, case: Case, dtype: torch.dtype | None = None, form: Any = None) -> Result:
    """By the definition, or another plain form, in the case's dtype or as given."""
    tensors = tensors_of(subject, case)
    if dtype is not None:
        tensors = {n: x.detach().to(dtype).requires_grad_(subject.differentiable) for n, x in tensors.items()}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thousands of tiny steps, which only wait for each other on two
    try:
        outputs = (form or subject.truth)(tensors, case)
        grads = differentiate(subject, case, outputs, tensors) if subject.differentiable else {}
    finally:
        torch.set_num_threads(threads)
    return Result({n: x.detach() for n, x in outputs.items()}, grads)


@cache
def expected(op: str, case: Case) -> tuple[Result, Result | None]:
    """The truth, and the plain formula in the case's own dtype, whose error is the measure of ours (None: float64)."""
    subject = subjects()[op]
    exact = defined(subject, case, torch.float64)
    if case.dtype == "float64":
        return exact, None
    plain = defined(subject, case)
    if subject.chunked is not None:
        plain = _worse(exact, plain, defined(subject, case, form=subject.chunked))
    return exact, plain


def _worse(exact: Result, *found: Result) -> Result:
    """Of each tensor that which is further from the truth."""

    def worst(want: Any, candidates: list[Any]) -> Any:
        return max(candidates, key=lambda x: -1.0 if x is None or want is None else relative_rms(x, want))

    outputs = {n: worst(x, [r.outputs[n] for r in found]) for n, x in exact.outputs.items()}
    return Result(outputs, {n: worst(x, [r.grads[n] for r in found]) for n, x in exact.grads.items()})


def check(subject: Subject, case: Case, backend: str) -> None:
    """The case on the backend is within budget of the definition, forward and backward."""
    tensors = tensors_of(subject, case)
    outputs = subject.call(tensors, case, backend)
    served = registry.last_backend(subject.op)
    assert served == backend, f"{served} served a call that named {backend}"
    exact, plain = expected(subject.op, replace(case, backends=()))
    assert outputs.keys() == exact.outputs.keys()
    for name, x in outputs.items():
        check_close(name, x.detach(), exact.outputs[name], plain=plain and plain.outputs[name])
    if not subject.differentiable:
        return
    for name, grad in differentiate(subject, case, outputs, tensors).items():
        check_grad(name, grad, tensors[name], exact.grads[name], plain and plain.grads[name], case.dtype)


def check_grad(name: str, grad: Any, x: torch.Tensor, exact: Any, plain: Any, dtype: str) -> None:
    """A gradient in its input's dtype, within the budget of the inputs' dtype; no gradient is as good as zeros."""
    if exact is None:
        assert grad is None or not grad.any(), f"d{name} should be zero"
        return
    assert grad is not None, f"d{name} is missing"
    assert grad.dtype == x.dtype, f"d{name} has dtype {grad.dtype}; expected {x.dtype}"
    check_close(f"d{name}", grad, exact, plain=plain, dtype=dtype)
