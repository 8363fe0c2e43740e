"""The trial of a CUDA kernel: it passes each one, and none that is a little wrong.

Kernels run under the emulator. A fault is put into what is handed to a launch, or into what it leaves, so that a faulty
kernel needs no build of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from autotune import target
from autotune.emulator import Emulated
from autotune.verify import VerificationError
from linattn_tl.guarded import GUARD
from linattn_tl.launchers import EmulatedLauncher
from linattn_tl.ops.linear_attention import trial_cuda
from linattn_tl.ops.linear_attention.definition import Options, decode
from linattn_tl.ops.linear_attention.trial_cuda import TENSORS, check, workload
from tests.conftest import CACHE
from tests.emulated import lowered
from tl_kernels.linear_attention import cuda
from tl_kernels.spec import Kernel, Problem

PLACES = {  # arch, dtype, K, V
    "forward": ("sm_90a", "bfloat16", 32, 32),
    "carry": ("sm_90a", "bfloat16", 64, 64),
    "scan": ("sm_80", "float32", 64, 32),
    "emit": ("sm_120a", "float16", 48, 80),
    "decode": ("sm_90a", "float16", 48, 80),
    "backward_q": ("sm_90a", "bfloat16", 64, 64),
    "backward_kv": ("sm_90a", "bfloat16", 64, 64),
    "backward_k": ("sm_120a", "float32", 32, 48),
    "backward_v": ("sm_80", "float16", 32, 48),
    "backward_q_all": ("sm_80", "float32", 32, 32),
    "backward_carry": ("sm_120a", "bfloat16", 48, 80),
    "backward_k_all": ("sm_80", "bfloat16", 32, 64),
    "backward_v_all": ("sm_90a", "float16", 32, 32),
}
KERNELS = {k.name.split(".")[1]: k for k in cuda.KERNELS}
ORDER = {**TENSORS, "decode": ("q", "k", "v", "o", "kv", "z", "slots")}


@cache
def built(stage: str) -> tuple[Kernel, Problem, EmulatedLauncher]:
    """The kernel's first config."""
    arch, dtype, K, V = PLACES[stage]
    kernel, problem = KERNELS[stage], Problem("linear_attention", dtype, K, V, "cuda")
    config = kernel.configs(problem, target.named(arch))[0]
    function = lowered(kernel, problem, config, arch)
    return kernel, problem, EmulatedLauncher(Emulated(function, cache=CACHE / "emulator"), config)


def test_every_kernel_is_tried():
    assert PLACES.keys() == KERNELS.keys() == {*TENSORS, "decode"} == {*trial_cuda.TRIALS, "decode"}


@pytest.mark.parametrize("stage", PLACES)
def test_a_right_kernel_passes(stage: str):
    check(*built(stage))


def test_in_any_mode_of_the_caller():
    with torch.inference_mode(), torch.autocast("cpu"):
        trial_cuda._solved.cache_clear()
        check(*built("scan"))


# ---- faults

Named = dict[str, Any]  # tensors; None where there is none


def _nothing(x: Named) -> None: ...


@dataclass(frozen=True)
class Fault:
    """What a wrong kernel does: `before` and `after` change the tensors it is given and those it has written."""

    name: str
    numbers: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda numbers: {}
    before: Callable[[Named], None] = _nothing
    after: Callable[[Named], None] = _nothing


class Faulty:
    """A launcher whose kernel has a fault."""

    def __init__(self, launcher: EmulatedLauncher, order: Sequence[str], fault: Fault):
        self.launcher, self.order, self.fault = launcher, order, fault
        self.config, self.kept = launcher.config, {}

    def pack(self, numbers: Mapping[str, float]) -> Any:
        return self.launcher.pack({**numbers, **self.fault.numbers(numbers)})

    def launch(self, packed: Any, tensors: Sequence[torch.Tensor | None]) -> None:
        given = dict(zip(self.order, tensors, strict=False))
        self.fault.before(given)
        self.launcher.launch(packed, [*given.values(), *tensors[len(given) :]])
        self.fault.after(given)


def rows(x: torch.Tensor) -> torch.Tensor:
    """Those that belong to something; all of a copy that the runner made."""
    return x if x._base is None else x._base[GUARD:-GUARD]


def larger(name: str) -> Fault:
    """By 5 %."""

    def after(x: Named) -> None:
        if x[name] is not None:
            rows(x[name]).mul_(1.05)

    return Fault(f"{name} is larger", after=after)


def torn(name: str) -> Fault:
    def after(x: Named) -> None:
        if x[name] is not None:
            rows(x[name])[-1] = torch.nan

    return Fault(f"{name} misses its last row", after=after)


def in_front(name: str) -> Fault:
    """The row before the first one."""

    def after(x: Named) -> None:
        if x[name] is not None:
            x[name]._base[GUARD - 1] = 0

    return Fault(f"{name} is written in front of its first row", after=after)


def foreign(name: str, row: int) -> Fault:
    """A row of what the kernel only reads, or need not look at."""

    def after(x: Named) -> None:
        rows(x[name])[row] = 0

    return Fault(f"{name} is written in row {row}", after=after)


def past_the_end(name: str) -> Fault:
    """The row behind the last token, sequence or span."""

    def after(x: Named) -> None:
        if x[name] is not None:
            x[name]._base[-GUARD] = 0

    return Fault(f"{name} is written past the end", after=after)


def spare(name: str) -> Fault:
    def after(x: Named) -> None:
        mine = rows(x[name])
        mine[mine.flatten(1).isnan().all(1)] = 0

    return Fault(f"{name} is written in rows that nobody names", after=after)


def ignores(name: str) -> Fault:
    """A switch, as if it were off."""
    return Fault(f"ignores {name}", numbers=lambda numbers: {name: 0})


def takes(name: str, value: float) -> Fault:
    return Fault(f"takes {value} for {name}", numbers=lambda numbers: {name: value})


def flips(name: str) -> Fault:
    return Fault(f"flips {name}", numbers=lambda numbers: {name: 1 - numbers[name]})


def no_last_token() -> Fault:
    def before(x: Named) -> None:
        if x["cu_seqlens"] is not None:
            x["cu_seqlens"] = x["cu_seqlens"].clone()
            x["cu_seqlens"][-1] -= 1

    return Fault("ignores the last packed token", before=before)


def padding_is_not_zero() -> Fault:
    def after(x: Named) -> None:
        if x["slots"] is not None:
            x["o"][x["slots"] < 0] = 0.5

    return Fault("o of padding is not zero", after=after)


FAULTS: Mapping[str, tuple[Fault, ...]] = {
    "forward": (
        larger("o"), torn("o"), torn("den"), larger("z1"), past_the_end("o"), past_the_end("kv1"), in_front("den"),
        ignores("initial"), ignores("final"), ignores("keep_den"), takes("feature_map", 0), takes("scale", 0.6),
        flips("normalize"), no_last_token(),
    ),
    "carry": (larger("kv1"), torn("z1"), past_the_end("kv1"), ignores("initial"), no_last_token()),
    "scan": (
        larger("kv1"), spare("kv"), spare("z"), flips("reverse"), ignores("initial"), ignores("final"),
    ),
    "emit": (larger("o"), torn("den"), past_the_end("o"), flips("normalize")),
    "decode": (larger("o"), larger("z"), spare("kv"), in_front("o"), padding_is_not_zero()),
    "backward_q": (larger("delta"), torn("dq"), past_the_end("delta"), foreign("v", 0), ignores("initial")),
    "backward_kv": (larger("dv"), torn("dk"), past_the_end("dz0"), ignores("final"), no_last_token()),
    "backward_k": (larger("dk"), foreign("dv", 0), ignores("initial")),
    "backward_v": (larger("dv"), foreign("dk", 0), ignores("final")),
    "backward_q_all": (larger("dq"), torn("delta")),
    "backward_carry": (larger("dz0"), ignores("final"), no_last_token()),
    "backward_k_all": (larger("dk"), past_the_end("dk")),
    "backward_v_all": (torn("dv"), ignores("final")),
}  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "fault"), [pytest.param(s, f, id=f"{s}: {f.name}") for s, faults in FAULTS.items() for f in faults]
)
def test_a_wrong_kernel_does_not(stage: str, fault: Fault):
    kernel, problem, launcher = built(stage)
    said = rf"^{kernel.name} {problem.dtype} K={problem.K} V={problem.V}, \w+\(.*\): \w+ "
    with pytest.raises(VerificationError, match=said):
        check(kernel, problem, Faulty(launcher, ORDER[stage], fault))


class Defined:
    """A decode kernel that is the definition, with `outside` where a slot is not in the pool."""

    def __init__(self, outside: float, stray: bool = False):
        self.outside, self.stray = outside, stray
        self.config, self.kept = None, {}

    def pack(self, numbers: Mapping[str, float]) -> Any:
        return numbers

    def launch(self, packed: Any, tensors: Sequence[Any]) -> None:
        q, k, v, o, kv, z, slots = tensors
        live = (slots >= 0) & (slots < len(kv))
        o[live] = decode(q[live], k[live], v[live], kv, z, slots[live], Options(), torch.empty_like(o[live]))
        o[slots == -1] = 0
        o[~live & (slots != -1)] = self.outside
        if self.stray:
            kv[-1] = 0


def test_slots_outside_of_the_pool(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trial_cuda, "DECODE_CASES", trial_cuda.DECODE_CASES[-1:])
    right: Any = (KERNELS["decode"], Problem("linear_attention", "float32", 16, 32, "cuda"))
    check(*right, Defined(torch.nan))
    with pytest.raises(VerificationError, match="o is not NaN where the slot is outside of the pool"):
        check(*right, Defined(0.0))
    with pytest.raises(VerificationError, match="kv changed in 1 rows, the first of them row 3 of 4"):
        check(*right, Defined(torch.nan, stray=True))


# ---- what is timed

ROWS = 20 * 2  # tokens and heads
FLOORS = {  # flops of a token and head over K V; bytes by those of an element, K and V
    "forward": (4, lambda io, K, V: ROWS * (io * (2 * K + 2 * V) + 4)),
    "carry": (2, lambda io, K, V: ROWS * io * (K + V) + 8 * (K * V + K)),
    "scan": (0, lambda io, K, V: 16 * (K * V + K)),
    "emit": (2, lambda io, K, V: ROWS * (io * (K + V) + 4) + 8 * (K * V + K)),
    "decode": (4, lambda io, K, V: ROWS * (io * (2 * K + 2 * V) + 8 * (K * V + K))),
    "backward_q": (4, lambda io, K, V: ROWS * (io * (3 * K + 3 * V) + 8)),
    "backward_q_all": (2, lambda io, K, V: ROWS * (io * (2 * K + 2 * V) + 8) + 8 * (K * V + K)),
    "backward_kv": (6, lambda io, K, V: ROWS * (io * (3 * K + 3 * V) + 8)),
    "backward_k": (4, lambda io, K, V: ROWS * (io * (3 * K + 2 * V) + 8)),
    "backward_v": (4, lambda io, K, V: ROWS * (io * (2 * K + 2 * V) + 4)),
    "backward_carry": (2, lambda io, K, V: ROWS * (io * (K + V) + 8) + 8 * (K * V + K)),
    "backward_k_all": (2, lambda io, K, V: ROWS * io * (2 * K + V) + 8 * (K * V + K)),
    "backward_v_all": (2, lambda io, K, V: ROWS * io * (K + V) + 8 * K * V),
}


@pytest.mark.parametrize("stage", PLACES)
def test_workload(stage: str):
    kernel, problem, launcher = built(stage)
    batch = 20 if stage == "decode" else 1
    work = workload(kernel, problem, launcher, tokens=20, batch=batch, heads=2)
    work.call()
    flops, moved = FLOORS[stage]
    K, V = problem.K, problem.V
    assert work.flops == flops * ROWS * K * V
    assert work.bytes == moved(4 if problem.dtype == "float32" else 2, K, V)


def test_workloads_are_of_the_size_of_a_model():
    """4 sequences of 4096 tokens, 16 heads."""

    class Sizes:
        config, kept = None, {}

        def pack(self, numbers: Mapping[str, float]) -> Any:
            self.numbers = numbers

    for stage in ("forward", "scan", "backward_k_all"):
        sizes: Any = Sizes()
        work = workload(KERNELS[stage], Problem("linear_attention", "bfloat16", 16, 16, "cuda"), sizes)
        n = sizes.numbers
        assert n["H"] == n["HV"] == 16 and n["sequences"] == 4 and n["length"] == 4096
        assert n["segment"] == (512 if stage in trial_cuda.IN_SPANS else 4096)
        assert work.flops == FLOORS[stage][0] * 4 * 4096 * 16 * 16 * 16
