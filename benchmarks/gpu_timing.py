"""A section of benchmarks.gpu_check: how fast, against what the device can copy and against other implementations.

Contestants are timed in turns, in one run, by CUDA events. Before each of their runs a buffer larger than the L2 cache
is written, so that all of them read cold memory; what the host needs to launch a run passes meanwhile, up to that
write's time. On the CPU, where only the script itself is tested, the timer is the host's clock and nothing is flushed.

GB/s are the floor, each tensor moved once, over the time; the share is that of a large copy on the same device. Nothing
is timed before its result has been checked against the definition in float64, on one sequence and its first heads.
"""

import importlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any

import torch

from autotune import measure, verify
from benchmarks.gpu_rows import Check, Found, Session, first_line
from linattn_tl import linear_attention, linear_attention_decode
from linattn_tl.ops.linear_attention.definition import Options, TorchRunner, chunked, decode

OURS, EAGER, FLA = "ours", "torch", "fla"  # fla: flash-linear-attention, if it is installed
ROUNDS, QUICK_ROUNDS, WARMUP = 20, 5, 3
COPY_BYTES, FLUSH_BYTES = 2**30, 2**28  # at most, at least
CHECKED_HEADS = 2

Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """linear_attention with K = V = D and HV = H."""

    what: str  # "forward", "backward" (alone, the graph being there) or "decode"
    dtype: str
    B: int
    H: int
    D: int
    T: int = 1

    @property
    def name(self) -> str:
        length = "" if self.what == "decode" else f" T={self.T}"
        return f"{self.what} {self.dtype} B={self.B} H={self.H}{length} D={self.D}"

    @property
    def floor_bytes(self) -> int:
        """Each tensor moved once: q k v o; with dO dq dk dv for a backward; with the state, read and written."""
        item = 4 if self.dtype == "float32" else 2
        tokens = self.B * self.T * self.H * self.D * item
        if self.what == "decode":
            return 4 * tokens + 2 * self.B * self.H * (self.D + 1) * self.D * 4
        return (8 if self.what == "backward" else 4) * tokens


@dataclass(frozen=True)
class Timing:
    """The time of one call, over the rounds."""

    median_us: float
    min_us: float
    rounds: int


@dataclass
class Contestants:
    """What to time, each checked, and who was left out and why."""

    runs: dict[str, Run] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


# ---- the clock


def time_in_turns(runs: dict[str, Run], session: Session) -> dict[str, Timing]:
    rounds = QUICK_ROUNDS if session.quick else ROUNDS
    if not session.cuda:
        found = measure.interleaved(runs, rounds=rounds)
        return {name: Timing(t.median_us, t.min_us, t.rounds) for name, t in found.items()}
    for run in (run for run in runs.values() for _ in range(WARMUP)):
        run()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for i in range(rounds):
        turn = names[i % len(names) :] + names[: i % len(names)]
        for name, us in zip(turn, _one_round([runs[name] for name in turn], session.device), strict=True):
            samples[name].append(us)
    return {name: Timing(statistics.median(us), min(us), rounds) for name, us in samples.items()}


def _one_round(runs: Sequence[Run], device: torch.device) -> list[float]:
    """Microseconds of each, cold."""
    flush, marks = _flush_buffer(device), []
    for run in runs:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        kept = run()
        end.record()
        del kept  # into torch's pool, as a model does
        marks.append((begin, end))
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) * 1e3 for begin, end in marks]


@cache
def _flush_buffer(device: torch.device) -> torch.Tensor:
    cached = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(max(4 * cached, FLUSH_BYTES), dtype=torch.uint8, device=device)


@cache
def copy_gbps(session: Session) -> float:
    """GB/s of a large copy, reads and writes counted, in the same way as everything else is timed."""
    if not session.cuda:
        return measure.bandwidth_gbps()
    count = min(COPY_BYTES, torch.cuda.mem_get_info(session.device)[0] // 8)
    source = torch.ones(count, dtype=torch.uint8, device=session.device)
    copy = torch.empty_like(source)
    return 2 * count / time_in_turns({"copy": lambda: copy.copy_(source)}, session)["copy"].median_us / 1e3


# ---- what is timed


def cases(session: Session) -> list[Case]:
    if not session.cuda:
        return [
            *(Case(what, "float32", B=2, H=2, T=128, D=16) for what in ("forward", "backward")),
            Case("decode", "float32", B=2, H=2, D=16),
        ]
    passes, wide = ("forward", "backward"), [("bfloat16", D) for D in (64, 128)]
    narrow = [] if session.quick else [("float16", 128), ("float32", 128)]
    found = [Case(what, dtype, B=8, H=16, T=4096, D=D) for dtype, D in wide + narrow for what in passes]
    if not session.quick:
        found += [Case(what, dtype, B=1, H=4, T=65536, D=D) for dtype, D in wide for what in passes]
    return found + [Case("decode", dtype, B=64, H=16, D=D) for dtype, D in wide + narrow]


def timing_checks(session: Session) -> list[Check]:
    """The device's copy bandwidth, then each case."""
    timed = [Check(case.name, partial(time_case, case, session)) for case in cases(session)]
    return [Check("copy bandwidth", partial(_copy_check, session)), *timed]


def _copy_check(session: Session) -> Found:
    return Found(f"{copy_gbps(session):.4g} GB/s", {"copy_gbps": round(copy_gbps(session), 1)})


def time_case(case: Case, session: Session) -> Found:
    """Check every contestant, then time them in turns."""
    contestants = (_decode_contestants if case.what == "decode" else _sequence_contestants)(case, session)
    times = time_in_turns(contestants.runs, session)
    ours = times[OURS]
    gbps = case.floor_bytes / ours.median_us / 1e3
    share = gbps / copy_gbps(session)
    ratios = {name: t.median_us / ours.median_us for name, t in times.items() if name != OURS}
    numbers: dict[str, Any] = {
        **asdict(case),
        "floor_bytes": case.floor_bytes,
        "times": {name: asdict(t) for name, t in times.items()},
        "gbps": gbps,
        "share_of_copy": share,
        "ratios": ratios,
        "left_out": contestants.left_out,
    }
    said = "".join(f", {name} {ratio:.2f}x" for name, ratio in ratios.items())
    return Found(f"{ours.median_us:.0f} us, {gbps:.4g} GB/s, {share:.0%} of copy{said}", numbers)


# ---- whole sequences


def _sequence_contestants(case: Case, session: Session) -> Contestants:
    g = torch.Generator(session.device).manual_seed(0)
    grad, dtype = case.what == "backward", getattr(torch, case.dtype)
    new = partial(torch.randn, case.B, case.T, case.H, case.D, generator=g, device=session.device)
    q, k, v = (new().to(dtype).requires_grad_(grad) for _ in "qkv")
    upstream = new().to(dtype) if grad else None
    exact = _exact(q, k, v, upstream)
    forms: dict[str, Callable[..., torch.Tensor]] = {
        OURS: lambda q, k, v: linear_attention(q, k, v, backend=session.backend)[0],
        EAGER: lambda q, k, v: linear_attention(q, k, v, backend="torch")[0],
    }
    contestants = Contestants()
    if (fla := _fla_form(session)) is not None:
        forms[FLA] = fla
    for name, form in forms.items():
        try:
            run = _sequence_run(form, (q, k, v), upstream)
            _check_slice(run(), exact, case.dtype)
        except Exception as error:  # a rival that fails or is wrong is left out; ours is a failure
            if name == OURS:
                raise
            contestants.left_out[name] = first_line(error)
        else:
            contestants.runs[name] = run
    return contestants


def _sequence_run(form: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], upstream: Any) -> Run:
    if upstream is None:
        return lambda: (form(*inputs),)
    o = form(*inputs)
    return lambda: torch.autograd.grad(o, inputs, upstream, retain_graph=True)


def _slice(x: torch.Tensor) -> torch.Tensor:
    """One sequence and its first heads: the others do not bear on them."""
    return x.detach()[:1, :, :CHECKED_HEADS]


def _exact(q: Any, k: Any, v: Any, upstream: Any) -> Sequence[torch.Tensor]:
    """o, or the gradients, of one sequence and its first heads in float64, in chunks."""
    leaves = [_slice(x).double().requires_grad_(upstream is not None) for x in (q, k, v)]
    o = TorchRunner(chunked).forward((*leaves, None, None), None, Options())[0][0]
    return [o] if upstream is None else torch.autograd.grad(o, leaves, _slice(upstream).double())


def _check_slice(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], dtype: str) -> None:
    names = ("o",) if len(exact) == 1 else ("dq", "dk", "dv")
    for name, got, want in zip(names, found, exact, strict=True):
        verify.check_close(name, _slice(got), want, dtype=dtype)


@cache
def _fla() -> Any:
    """flash-linear-attention's op over whole sequences, or None where it is not installed."""
    try:
        return importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    except ImportError:
        return None


def _fla_form(session: Session) -> Callable[..., torch.Tensor] | None:
    """Its feature map is torch's, outside of the kernel, as in its layers; its normaliser too."""
    op = _fla() if session.cuda else None
    if op is None:
        return None
    phi = lambda x: torch.nn.functional.elu(x) + 1  # noqa: E731
    return lambda q, k, v: op(phi(q), phi(k), v, scale=1.0, normalize=True)[0]


# ---- decode


def _decode_contestants(case: Case, session: Session) -> Contestants:
    """In place on a state of their own each; checked on three steps from zeros before anything is timed."""
    g = torch.Generator(session.device).manual_seed(0)
    dtype = getattr(torch, case.dtype)
    q, k, v = (
        torch.randn(case.B, case.H, case.D, generator=g, device=session.device).to(dtype) for _ in "qkv"
    )  # fmt: skip
    contestants = Contestants()
    for name, backend in ((OURS, session.backend), (EAGER, "torch")):
        kv, z = _zero_state(case, torch.float32, session)
        run = partial(linear_attention_decode, q, k, v, (kv, z), out=torch.full_like(v, float("nan")), backend=backend)
        _check_steps(run, (q, k, v, kv, z), case, session)
        contestants.runs[name] = run
    return contestants


def _zero_state(case: Case, dtype: torch.dtype, session: Session) -> tuple[torch.Tensor, torch.Tensor]:
    kv = torch.zeros(case.B, case.H, case.D, case.D, dtype=dtype, device=session.device)
    return kv, torch.zeros(case.B, case.H, case.D, dtype=dtype, device=session.device)


def _check_steps(run: Run, tensors: Sequence[torch.Tensor], case: Case, session: Session) -> None:
    q, k, v, kv, z = tensors
    exact_kv, exact_z = _zero_state(case, torch.float64, session)
    want = torch.empty_like(v, dtype=torch.float64)
    for _ in range(3):
        o = run()
        decode(q.double(), k.double(), v.double(), exact_kv, exact_z, None, Options(), want)
    verify.check_close("o", o, want, dtype=case.dtype)
    verify.check_close("kv", kv, exact_kv, dtype="float32")
    verify.check_close("z", z, exact_z, dtype="float32")
