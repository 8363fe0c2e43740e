"""What is measured: each case's inputs, its truth, its contestants and its least amount of work.

A case is prepared before it is timed: every contestant is run and compared with the definition in float64, and the
variants of a rival (chunk size, form) are tried, so that only its fastest one competes.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import linattn_tl
from autotune import measure, verify
from benchmarks import rivals
from linattn_tl.ops.linear_attention.definition import Options, TorchRunner, chunked, decode, recurrent

OURS = "ours"
GROUPS = ("forward", "backward", "long", "dtype", "decode", "overhead", "import")
CHUNKS = (64, 128)  # of the parallel form: with smaller ones the states take longer, with larger ones the weights
LOOP_CHUNKS = {"forward": 256, "backward": 128}  # the best ones of the compiled loop
LOOP_STEPS = 32  # it is unrolled: more steps take minutes to compile
PREFIX = 128  # tokens on which the float64 truth of a long case is itself checked, token by token
FLOPS_CHUNK = 32

Outputs = Sequence[torch.Tensor]
State = tuple[torch.Tensor, torch.Tensor]  # kv, z


@dataclass(frozen=True)
class Case:
    group: str
    threads: int
    T: int  # 1 in decode
    D: int  # K = V
    B: int = 1
    H: int = 8
    dtype: str = "float32"
    rivals: tuple[str, ...] = ("eager chunked", "compile chunked", "eager tuned", "eager loop", "compile tuned", "SDPA")
    compile_loop: bool = True

    @property
    def label(self) -> str:
        size = f"B={self.B}" if self.group == "decode" else f"T={self.T}"
        return f"{self.group} {size} D={self.D}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    @property
    def flops(self) -> int:
        """The least that chunks of 32 need: products with masked weights count as half."""
        state, inside = self.D * self.D, (FLOPS_CHUNK + 1) * 2 * self.D
        per_token = 14 * state + 4 * inside if self.group == "backward" else 4 * state + inside
        return self.B * self.H * self.T * per_token

    @property
    def state_bytes(self) -> int:
        """What a decode step must move: the fp32 state, read and written."""
        return 2 * self.B * self.H * self.D * self.D * 4


@dataclass(frozen=True)
class Contestant:
    run: Callable[[], object]  # what is timed
    outputs: Callable[[], Outputs] | None  # what is checked; None: it computes another function
    variant: str = ""


@dataclass
class Prepared:
    case: Case
    contestants: dict[str, Contestant] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)  # rival -> why
    chunk: int = CHUNKS[-1]  # the best one of the parallel form


@dataclass(frozen=True)
class Result:
    case: Case
    times: Mapping[str, measure.Timing]
    variants: Mapping[str, str]  # contestant -> which backend or form it was
    left_out: Mapping[str, str]

    def ratio(self, name: str) -> float | None:
        """The contestant's time over ours; None if it was left out."""
        return self.times[name].median_us / self.times[OURS].median_us if name in self.times else None


class WrongResult(RuntimeError):
    """A contestant computes something else: nothing is timed."""


def suite(groups: Sequence[str], threads: Sequence[int], quick: bool) -> list[Case]:
    """The cases of the groups that are tables of contestants, in the order they are shown."""
    dims = (128,) if quick else (128, 64)
    decode_rivals = ("eager in place", "torch.compile", "definition")
    dtype_rivals = ("bfloat16", "float16")
    cases = [Case("forward", t, 4096, D) for D in dims for t in threads]
    cases += [Case("backward", t, 4096, D, compile_loop=not quick) for D in dims for t in threads]
    if not quick:
        cases += [Case("long", t, 16384, 128, compile_loop=False) for t in threads]
        cases += [Case("dtype", t, 4096, 128, rivals=dtype_rivals) for t in threads]
    batches = (16,) if quick else (1, 16, 64)
    cases += [Case("decode", threads[0], 1, 128, B=B, H=16, rivals=decode_rivals) for B in batches]
    return [case for case in cases if case.group in groups]


def scaling_suite(threads: int, quick: bool) -> list[Case]:
    """Time against T, for the plot. A quick run leaves out the lengths where softmax attention takes seconds."""
    lengths = [512 << i for i in range(5 if quick else 6)]
    rival_names = ("eager chunked", "eager tuned", "eager loop", "SDPA")
    return [Case("scaling", threads, T, 64, H=4, rivals=rival_names) for T in lengths]


def prepare(case: Case) -> Prepared:
    """Inputs and contestants of a case, all checked. Raises WrongResult, naming the contestant that is wrong."""
    torch.set_num_threads(case.threads)
    torch.compiler.reset()  # what was compiled for other cases counts against the compiler's limit of variants
    makers = {"decode": _prepare_decode, "dtype": _prepare_dtypes}
    return makers.get(case.group, _prepare_sequence)(case)


def measured(prepared: Prepared, rounds: int, progress: Callable[[int, int], None] | None = None) -> Result:
    """Times the contestants in turns. Keeps none of their tensors."""
    runs = {name: contestant.run for name, contestant in prepared.contestants.items()}
    times = measure.interleaved(runs, rounds=rounds, min_round_s=5e-3, progress=progress)
    variants = {name: contestant.variant for name, contestant in prepared.contestants.items()}
    return Result(prepared.case, times, variants, prepared.left_out)


def check(contestants: Mapping[str, Contestant], exact: Outputs, names: Sequence[str], dtype: str) -> None:
    for who, contestant in contestants.items():
        if contestant.outputs is None:
            continue
        for name, got, want in zip(names, contestant.outputs(), exact, strict=True):
            try:
                verify.check_close(name, got, want, dtype=dtype)
            except verify.VerificationError as error:
                variant = f" ({contestant.variant})" if contestant.variant else ""
                raise WrongResult(f"{who}{variant} is wrong: {error}") from None


# ---- whole sequences


def _inputs(case: Case, grad: bool) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.dtype)
    shape = (case.B, case.T, case.H, case.D)
    return [torch.randn(shape, generator=g).to(dtype).requires_grad_(grad) for _ in "qkv"]


def _exact(inputs: Sequence[torch.Tensor], upstream: torch.Tensor | None) -> list[torch.Tensor]:
    """o, and with an upstream gradient dq, dk, dv, in float64.

    In chunks, because a long sequence token by token takes minutes; its first tokens are checked token by token.
    """
    grad = upstream is not None
    q, k, v = (x.detach().double().requires_grad_(grad) for x in inputs)
    o = TorchRunner(chunked).forward((q, k, v, None, None), None, Options())[0][0]
    with torch.no_grad():
        head = [x[:, :PREFIX] for x in (q, k, v)]
        first = TorchRunner(recurrent).forward((*head, None, None), None, Options())[0][0]
        verify.check_close("float64 truth", o[:, :PREFIX], first, dtype="float64")
    grads = torch.autograd.grad(o, (q, k, v), upstream.double()) if grad else ()
    return [o.detach(), *grads]


def _prepare_sequence(case: Case) -> Prepared:
    prepared = Prepared(case)
    backward = case.group == "backward"
    inputs = _inputs(case, backward)
    upstream = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(1)) if backward else None
    make = functools.partial(_contestant, inputs=inputs, upstream=upstream)
    prepared.contestants[OURS] = make(lambda q, k, v: linattn_tl.linear_attention(q, k, v)[0])
    linattn_tl.linear_attention(*inputs)
    prepared.contestants[OURS] = replace(
        prepared.contestants[OURS], variant=linattn_tl.last_backend("linear_attention") or ""
    )
    for name in case.rivals:
        _add_rival(prepared, name, make)
    names = ("o", "dq", "dk", "dv") if backward else ("o",)
    check(prepared.contestants, _exact(inputs, upstream), names, case.dtype)
    return prepared


def _contestant(
    form: rivals.Form,
    variant: str = "",
    *,
    inputs: Sequence[torch.Tensor],
    upstream: torch.Tensor | None,
    same_function: bool = True,
) -> Contestant:
    def run() -> Outputs:
        o = form(*inputs)
        return (o,) if upstream is None else (o, *torch.autograd.grad(o, inputs, upstream))

    return Contestant(run, run if same_function else None, variant)


def _add_rival(prepared: Prepared, name: str, make: Callable[..., Contestant]) -> None:
    if name == "SDPA":
        prepared.contestants[name] = make(rivals.sdpa, same_function=False)
    elif name == "eager loop":
        prepared.contestants[name] = make(
            lambda q, k, v: linattn_tl.linear_attention(q, k, v, backend="torch")[0], "backend='torch'"
        )
    elif name == "eager chunked":
        prepared.contestants[name] = _textbook(make)
    elif name == "compile chunked":
        _add_compiled(prepared, name, {"textbook": _textbook(make, rivals.compiled)})
    elif name == "eager tuned":
        prepared.chunk, prepared.contestants[name] = fastest({C: _parallel(make, C) for C in CHUNKS})
    else:
        _add_compiled(prepared, name, _compiled_variants(prepared, make))


def _textbook(make: Callable[..., Contestant], wrap: Callable[[Any], Any] = lambda f: f) -> Contestant:
    form = wrap(rivals.chunk_textbook)
    return make(lambda q, k, v: form(q, k, v, CHUNKS[0]), f"textbook C={CHUNKS[0]}")


def _parallel(make: Callable[..., Contestant], chunk: int, wrap: Callable[[Any], Any] = lambda f: f) -> Contestant:
    form = wrap(rivals.chunk_parallel)
    return make(lambda q, k, v: form(q, k, v, chunk), f"parallel C={chunk}")


def _compiled_variants(prepared: Prepared, make: Callable[..., Contestant]) -> dict[str, Contestant]:
    case = prepared.case
    variants = {"parallel": _parallel(make, prepared.chunk, rivals.compiled)}
    chunk = LOOP_CHUNKS.get(case.group, 0)
    if case.compile_loop and chunk * LOOP_STEPS >= case.T:
        loop = rivals.compiled(rivals.chunk_loop)
        variants["loop"] = make(lambda q, k, v: loop(q, k, v, chunk), f"loop C={chunk}")
    return variants


def _add_compiled(prepared: Prepared, name: str, variants: Mapping[str, Contestant]) -> None:
    try:
        prepared.contestants[name] = fastest(variants)[1]
    except Exception as error:  # whatever its compiler raises: the others can still be measured
        prepared.left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"


def fastest(variants: Mapping[Any, Contestant]) -> tuple[Any, Contestant]:
    """The variant with the best time of a short trial, and its key."""
    times = measure.interleaved({str(key): c.run for key, c in variants.items()}, rounds=3)
    return min(variants.items(), key=lambda item: times[str(item[0])].min_us)


def _prepare_dtypes(case: Case) -> Prepared:
    """Our kernel against itself in 16 bits, on the same numbers rounded."""
    prepared = Prepared(case)
    for dtype in (case.dtype, *case.rivals):
        inputs = _inputs(replace(case, dtype=dtype), False)
        form = lambda q, k, v: linattn_tl.linear_attention(q, k, v)[0]  # noqa: E731
        contestant = _contestant(form, inputs=inputs, upstream=None)
        check({f"{OURS} in {dtype}": contestant}, _exact(inputs, None), ("o",), dtype)
        name = OURS if dtype == case.dtype else dtype
        prepared.contestants[name] = replace(contestant, variant=linattn_tl.last_backend("linear_attention") or "")
    return prepared


# ---- decode


def _prepare_decode(case: Case) -> Prepared:
    prepared = Prepared(case)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(case.B, case.H, case.D, generator=g) for _ in "qkv")
    new_state = functools.partial(_zero_state, case)

    def make(step: Callable[..., object], variant: str = "") -> Contestant:
        mine, out = new_state(), torch.empty_like(v)

        def outputs() -> Outputs:
            kv, z = new_state()
            rows = [torch.full_like(v, float("nan")) for _ in range(3)]
            for row in rows:
                step(q, k, v, kv, z, row)
            return (torch.stack(rows), kv, z)

        return Contestant(lambda: step(q, k, v, *mine, out), outputs, variant)

    prepared.contestants[OURS] = ours = make(functools.partial(_our_step, "auto"))
    ours.run()
    prepared.contestants[OURS] = replace(ours, variant=linattn_tl.last_backend("linear_attention_decode") or "")
    steps = {"addcmul_": rivals.step_addcmul, "baddbmm_": rivals.step_baddbmm}
    for name in case.rivals:
        if name == "eager in place":
            _, prepared.contestants[name] = fastest({variant: make(step, variant) for variant, step in steps.items()})
        elif name == "definition":
            prepared.contestants[name] = make(functools.partial(_our_step, "torch"), "backend='torch'")
        else:
            _add_compiled_step(prepared, name, make)
    check(prepared.contestants, _exact_decode(q, k, v, new_state(torch.float64)), ("o", "kv", "z"), case.dtype)
    return prepared


def _zero_state(case: Case, dtype: torch.dtype = torch.float32) -> State:
    kv = torch.zeros(case.B, case.H, case.D, case.D, dtype=dtype)
    return kv, torch.zeros(case.B, case.H, case.D, dtype=dtype)


def _our_step(backend: str, q: Any, k: Any, v: Any, kv: Any, z: Any, out: Any) -> object:
    return linattn_tl.linear_attention_decode(q, k, v, (kv, z), out=out, backend=backend)


def _add_compiled_step(prepared: Prepared, name: str, make: Callable[..., Contestant]) -> None:
    step = rivals.compiled(rivals.step_fused)
    contestant = make(step, "one fused pass")
    try:
        contestant.run()
    except Exception as error:  # as for whole sequences
        prepared.left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    else:
        prepared.contestants[name] = contestant


def _exact_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, state: State) -> Outputs:
    q, k, v = (x.double().unsqueeze(1) for x in (q, k, v))
    rows = [decode(q, k, v, *state, None, Options(), torch.empty_like(v)).squeeze(1) for _ in range(3)]
    return (torch.stack(rows), *state)
