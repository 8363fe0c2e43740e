"""The CUDA kernels of linear attention under the emulator: values against the definition, and clean reports.

TileLang takes seconds to lower a kernel, so each is lowered once and runs all its cases.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from autotune.emulator import Emulated
from autotune.target import SHARED_LIMIT, named
from autotune.verify import check_close
from linattn_tl.ops.linear_attention.definition import Options, decode, packed, recurrent
from tests.conftest import CACHE
from tests.emulated import lowered
from tl_kernels.cuda_sizes import SLACK_BYTES, Blocks, Layout
from tl_kernels.linear_attention import cuda, cuda_backward
from tl_kernels.spec import DTYPES, Problem

MAPS = ("elu1", "relu", "identity")  # numbered as tl_kernels.macros numbers them
ARCHS = tuple(SHARED_LIMIT)
WHOLE = 1 << 30  # a segment as long as any sequence
NUMBERS = {"spans", "sequences", "length", "segment", "feature_map", "normalize", "scale", "eps"}
NUMBERS |= {"initial", "final", "keep_den", "reverse", "use_slots"}


def problem(dtype: str, K: int, V: int) -> Problem:
    return Problem("linear_attention", dtype, K, V, "cuda")


@cache
def built(stage: str, arch: str, dtype: str, K: int, V: int, *config: int) -> Any:
    """The stage's kernel for arch; config is its schedule, or the first one offered."""
    kernel = next(x for x in cuda.KERNELS if x.name == f"linear_attention.{stage}")
    p = problem(dtype, K, V)
    offered = kernel.configs(p, named(arch))
    chosen = type(offered[0])(*config) if config else offered[0]
    emulated = Emulated(lowered(kernel, p, chosen, arch), cache=CACHE / "emulator")
    # launchers hand numbers over by name, and TileLang renames a parameter that a macro has another name for
    assert {x.name for x in emulated.lowered.parameters if x.kind == "scalar"} <= NUMBERS
    return emulated


class Case(NamedTuple):
    """Sizes and options of one call. lengths packs sequences, and then B is 1."""

    B: int
    T: int
    H: int = 1
    HV: int = 2
    lengths: tuple[int, ...] = ()
    feature_map: str = "elu1"
    normalize: bool = True
    initial: bool = False
    scale: float = 0.5

    @property
    def sequences(self) -> int:
        return len(self.lengths) - 1 if self.lengths else self.B

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return torch.tensor(self.lengths or (0,), dtype=torch.int32)

    @property
    def length(self) -> int:
        return 0 if self.lengths else self.T

    def options(self, causal: bool = True) -> Options:
        return Options(self.feature_map, causal, self.normalize, self.scale, 1e-6)

    def spans(self, segment: int = WHOLE) -> tuple[int, int, int, int]:
        """spans, sequences, length, segment, as the kernels take them."""
        each = self.T // segment + self.sequences if self.lengths else self.B * -(-self.T // segment)
        return each, self.sequences, self.length, segment

    @property
    def phi(self) -> int:
        return MAPS.index(self.feature_map)

    @property
    def normal(self) -> tuple[int, float, float]:
        return int(self.normalize), self.scale, 1e-6


CASES = (
    Case(1, 1, initial=True),
    Case(1, 37, initial=True),
    Case(2, 64, 2, 2, feature_map="relu"),
    Case(1, 100, 2, 2, normalize=False, feature_map="identity", initial=True),
    Case(1, 100, 1, 2, lengths=(0, 7, 7, 71, 100), initial=True),
)


def inputs(case: Case, dtype: str, K: int, V: int) -> list[torch.Tensor]:
    """q, k, v [B, T, heads, width], kv [N, HV, K, V], z [N, H, K]."""
    io = getattr(torch, dtype)
    tokens = [torch.randn(case.B, case.T, *x).to(io) for x in ((case.H, K), (case.H, K), (case.HV, V))]
    N = case.sequences
    return [*tokens, torch.randn(N, case.HV, K, V), torch.rand(N, case.H, K) * 3]


def definition(case: Case, given: Sequence[torch.Tensor], causal: bool = True) -> tuple[torch.Tensor, ...]:
    """o, kv, z, den in float64; inputs that are float64 already are used as they are, for their gradients."""
    q, k, v, *states = (x.double() for x in given)
    lengths = case.cu_seqlens if case.lengths else None
    return packed(recurrent, [q, k, v, *(states if case.initial else (None, None))], lengths, case.options(causal))


def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def flat(x: torch.Tensor) -> torch.Tensor:
    """[B, T, ...] as the kernels take it, [B T, ...]."""
    return x.reshape(-1, *x.shape[2:])


def compare(actual: dict[str, torch.Tensor], exact: Sequence[torch.Tensor], dtype: str) -> None:
    for (name, got), truth in zip(actual.items(), exact, strict=True):
        check_close(name, got.reshape(truth.shape), truth, dtype=dtype)


def run_forward(kernel: Any, case: Case, dtype: str, K: int, V: int, check: bool = False) -> Any:
    given = inputs(case, dtype, K, V)
    q, k, v, kv, z = given
    tokens, N = case.B * case.T, case.sequences
    o, den = unwritten(tokens, case.HV, V, dtype=v.dtype), unwritten(tokens, case.H)
    finals = unwritten(N, case.HV, K, V), unwritten(N, case.H, K)
    call = kernel.check if check else kernel
    report = call(
        *(flat(q), flat(k), flat(v), o, den, kv, z, *finals, case.cu_seqlens),
        *(*case.spans(), int(case.initial), 1, 1, case.phi, *case.normal),
    ).assert_clean()
    names = ("o", "kv", "z", "den")
    compare(dict(zip(names, (o, *finals, den), strict=True)), definition(case, given), dtype)
    return report


@pytest.mark.parametrize(
    ("arch", "dtype", "K", "V", "config"),
    [
        ("sm_80", "bfloat16", 64, 64, (64, 64, 1, 128)),
        ("sm_90a", "bfloat16", 128, 128, (64, 128, 2, 256)),
        ("sm_120a", "float16", 32, 64, (32, 32, 0, 128)),
        ("sm_100a", "float32", 48, 48, (32, 64, 1, 256)),
    ],
)
def test_forward(arch: str, dtype: str, K: int, V: int, config: tuple[int, ...]):
    kernel = built("forward", arch, dtype, K, V, *config)
    for case in CASES:
        run_forward(kernel, case, dtype, K, V)
    run_forward(kernel, Case(2, 70), dtype, K, V, check=True)
    alone = inputs(Case(2, 70), dtype, K, V)
    o, nothing = unwritten(140, 2, V, dtype=alone[2].dtype), [x[:0] for x in alone[3:]]
    given = (*(flat(x) for x in alone[:3]), o, torch.zeros(0, 1), *nothing, *nothing, torch.zeros(1, dtype=torch.int32))
    kernel.check(*given, *Case(2, 70).spans(), 0, 0, 0, 0, 1, 0.5, 1e-6).assert_clean()  # every switch off
    compare({"o": o}, definition(Case(2, 70), alone)[:1], dtype)


def test_float16_sums_beyond_its_range():
    """After 60 tokens the state is above 65504, and so are the products of q and k; the averages are not."""
    K, V = 32, 64
    kernel = built("forward", "sm_120a", "float16", K, V, 32, 32, 0, 128)
    case = Case(1, 90, 1, 1, scale=1.0)
    q, k, _, kv, z = inputs(case, "float16", K, V)
    q, k, v = (q.abs() + 60).half(), (k.abs() + 60).half(), torch.full((1, 90, 1, V), 50.0).half()
    o = unwritten(90, 1, V, dtype=torch.float16)
    given = (flat(q), flat(k), flat(v), o, torch.zeros(0, 1), kv, z, kv[:0], z[:0], case.cu_seqlens)
    kernel(*given, *case.spans(), 0, 0, 0, case.phi, *case.normal).assert_clean()
    exact = definition(case, (q, k, v, kv, z))
    assert exact[1].max() > 65504 and exact[3].max() > 65504
    check_close("o", o.reshape(v.shape), exact[0])


@pytest.mark.parametrize(
    ("arch", "dtype", "K", "V"),
    [("sm_80", "bfloat16", 64, 64), ("sm_90a", "float16", 48, 80), ("sm_120a", "float32", 32, 16)],
)
def test_decode(arch: str, dtype: str, K: int, V: int):
    kernel = built("decode", arch, dtype, K, V)
    for case, slots in (
        (Case(2, 1), None),
        (Case(3, 3, 2, 2, feature_map="relu"), [4, -1, 0]),
        (Case(2, 2, 1, 1, feature_map="identity", normalize=False), [3, 1]),
    ):
        q, k, v, _, _ = inputs(case, dtype, K, V)
        kv, z = torch.randn(5, case.HV, K, V), torch.rand(5, case.H, K) * 3
        if slots is None:
            kv, z = kv[: case.B].contiguous(), z[: case.B].contiguous()
        o, index = unwritten(*v.shape, dtype=v.dtype), None if slots is None else torch.tensor(slots, dtype=torch.int32)
        exact = [kv.double(), z.double(), torch.zeros(v.shape, dtype=torch.float64)]
        decode(q.double(), k.double(), v.double(), exact[0], exact[1], index, case.options(), exact[2])
        before = kv.clone(), z.clone()
        report = kernel.check(
            *(q, k, v, o, kv, z, torch.zeros(1, dtype=torch.int32) if index is None else index),
            *(int(index is not None), case.phi, *case.normal),
        ).assert_clean()
        check_close("o", o, exact[2], dtype=dtype)
        check_close("kv", kv, exact[0], dtype="float32")
        check_close("z", z, exact[1], dtype="float32")
        if slots is not None:
            idle = [i for i in range(5) if i not in slots]
            assert torch.equal(kv[idle], before[0][idle]) and torch.equal(z[idle], before[1][idle])
            assert (o[[i for i, slot in enumerate(slots) if slot < 0]] == 0).all()
    assert report.counters.total.sector_ratio <= 1.01


def run_carry(kernel: Any, case: Case, given: Sequence[torch.Tensor], segment: int) -> list[torch.Tensor]:
    """kv and z of each span; from the initial state where spans are sequences."""
    _, k, v, kv, z = given
    spans = case.spans(segment)
    states = [unwritten(spans[0], *x.shape[1:]) for x in (kv, z)]
    initial = int(case.initial and segment == WHOLE)
    kernel(flat(k), flat(v), kv, z, *states, case.cu_seqlens, *spans, initial, case.phi).assert_clean()
    return states


@pytest.mark.parametrize(("arch", "dtype", "K", "V"), [("sm_90a", "bfloat16", 64, 64), ("sm_80", "float16", 32, 48)])
def test_noncausal(arch: str, dtype: str, K: int, V: int):
    """One pass over the keys, one over the queries; all queries see all keys of their sequence."""
    carry, emit = built("carry", arch, dtype, K, V), built("emit", arch, dtype, K, V)
    for case in CASES:
        given = inputs(case, dtype, K, V)
        states = run_carry(carry, case, given, WHOLE)
        o, den = unwritten(case.B * case.T, case.HV, V, dtype=given[2].dtype), unwritten(case.B * case.T, case.H)
        arguments = (flat(given[0]), o, den, *states, case.cu_seqlens)
        emit(*arguments, *case.spans(32), 1, case.phi, *case.normal).assert_clean()
        names = ("o", "kv", "z", "den")
        compare(dict(zip(names, (o, *states, den), strict=True)), definition(case, given, causal=False), dtype)


def test_chunks_in_parallel():
    """States of segments, a scan over them, then every segment by itself: the same as one pass."""
    arch, dtype, K, V, segment = "sm_80", "bfloat16", 64, 64, 64
    carry, scan = built("carry", arch, dtype, K, V), built("scan", arch, dtype, K, V)
    forward = built("forward", arch, dtype, K, V, 64, 64, 1, 128)
    for case in (Case(2, 150), Case(1, 64, initial=True), Case(1, 260, 1, 2, (0, 7, 7, 71, 260), initial=True)):
        given = inputs(case, dtype, K, V)
        q, k, v, kv, z = given
        states = run_carry(carry, case, given, segment)
        finals = [torch.full_like(x, torch.nan) for x in (kv, z)]
        matrices = [x.flatten(2) for x in (states[0], kv, finals[0])]  # views
        scan(
            *(matrices[0], states[1], matrices[1], z, matrices[2], finals[1], case.cu_seqlens),
            *(case.sequences, case.length, segment, int(case.initial), 1, 0),
        ).assert_clean()
        o, den = unwritten(case.B * case.T, case.HV, V, dtype=v.dtype), unwritten(case.B * case.T, case.H)
        forward(
            *(flat(q), flat(k), flat(v), o, den, *states, *(x[:0] for x in finals), case.cu_seqlens),
            *(*case.spans(segment), 1, 0, 1, case.phi, *case.normal),
        ).assert_clean()
        names = ("o", "kv", "z", "den")
        compare(dict(zip(names, (o, *finals, den), strict=True)), definition(case, given), dtype)


def run_backward(
    kernels: dict[str, Any], case: Case, dtype: str, K: int, V: int, causal: bool = True, check: bool = False
) -> None:
    """The kernels' gradients against autograd's of the definition, with gradients of the final state coming in."""
    given = inputs(case, dtype, K, V)
    leaves = [x.double().requires_grad_() for x in given]
    exact = definition(case, leaves, causal)
    dout, dkv, dz = (torch.randn(x.shape) for x in exact[:3])
    dout = dout.to(given[0].dtype)
    loss = sum((x * g.double()).sum() for x, g in zip(exact, (dout, dkv, dz), strict=False))
    wanted = leaves if case.initial else leaves[:3]
    truth = torch.autograd.grad(loss, wanted)

    q, k, v, kv, z = given
    tokens, N, group, io = case.B * case.T, case.sequences, case.HV // case.H, q.dtype
    o, kv1, z1, den = (x.detach() for x in exact)
    o, den = flat(o).to(io), flat(den).float()
    dq, dk = (unwritten(tokens, case.HV, K, dtype=io) for _ in range(2))
    dv, delta = unwritten(tokens, case.HV, V, dtype=io), unwritten(tokens, case.HV)
    dkv0, dz0 = unwritten(N, case.HV, K, V), unwritten(N, case.HV, K)
    dz_heads = torch.zeros(N, case.HV, K)
    dz_heads[:, ::group] = dz
    operands, upstream = (flat(q), flat(k), flat(v)), flat(dout)
    results = (dk, dv, dkv, dz_heads, dkv0, dz0, case.cu_seqlens)
    scale = (case.phi, int(case.normalize), case.scale)

    def call(name: str) -> Any:
        return kernels[name].check if check else kernels[name]

    def reverse(name: str, spans: Any, final: int, initial: int, ends: Any = results) -> None:
        given = (*operands, upstream, den, delta)
        call(name)(*given, *ends, *spans, final, initial, *scale).assert_clean()

    states = (kv, z) if causal else (kv1.float(), z1.float())
    known = (*operands, o, upstream, den, dq, delta, *states, case.cu_seqlens)
    first = "backward_q" if causal else "backward_q_all"
    spans = case.spans() if causal else case.spans(64)
    call(first)(*known, *spans, int(case.initial or not causal), *scale).assert_clean()
    if not causal:
        reverse("backward_carry", case.spans(), 1, 1)
        ends = (dk, dv, dkv0, dz0, dkv0[:0], dz0[:0], case.cu_seqlens)
        for name in ("backward_k_all", "backward_v_all"):
            reverse(name, spans, 1, 0, ends)
    for name in kernels if causal else ():
        if name != "backward_q":
            reverse(name, spans, 1, 1)

    def summed(x: torch.Tensor) -> torch.Tensor:
        return x.double().unflatten(1, (case.H, group)).sum(2)

    got = {"dq": summed(dq), "dk": summed(dk), "dv": dv, "dkv": dkv0, "dz": summed(dz0)}
    for (name, x), exact_grad in zip(got.items(), truth, strict=False):
        check_close(name, x.reshape(exact_grad.shape), exact_grad, dtype=dtype)


def test_backward():
    arch, dtype, D = "sm_90a", "bfloat16", 64
    kernels = {stage: built(stage, arch, dtype, D, D, 64, 64, 64, 128, 1) for stage in ("backward_q", "backward_kv")}
    for case in CASES:
        run_backward(kernels, case, dtype, D, D, check=case is CASES[1])


def test_backward_in_blocks():
    """dQ and dK in blocks of K, dV in blocks of V, as where they are too large for one program; chunks of two warps."""
    arch, dtype, K, V = "sm_120a", "float32", 48, 64
    kernels = {
        "backward_q": built("backward_q", arch, dtype, K, V, 16, 16, 64, 64, 0),
        "backward_k": built("backward_k", arch, dtype, K, V, 16, 16, 64, 64, 1),
        "backward_v": built("backward_v", arch, dtype, K, V, 32, 64, 32, 128, 1),
    }
    for case in CASES:
        run_backward(kernels, case, dtype, K, V, check=case is CASES[1])


def test_backward_refuses_to_split_a_sum():
    p = problem("float32", 64, 64)
    for build in (cuda_backward.backward_kv, cuda_backward.backward_v):
        with pytest.raises(ValueError, match="splits a sum"):
            build(p, Blocks(32, 32, 64, 128))
    for build in (cuda_backward.backward_q, cuda_backward.backward_k):
        with pytest.raises(ValueError, match="splits a sum"):
            build(p, Blocks(32, 64, 32, 128))


def test_noncausal_backward():
    arch, dtype, D = "sm_100a", "bfloat16", 32
    stages = ("backward_q_all", "backward_carry", "backward_k_all", "backward_v_all")
    kernels = {stage: built(stage, arch, dtype, D, D, 64, 32, 32, 128, 1) for stage in stages}
    for case in CASES:
        run_backward(kernels, case, dtype, D, D, causal=False, check=case is CASES[1])


def test_backward_of_chunks_in_parallel():
    """Every segment by itself: dQ from the states before it, dK and dV from the gradient states behind it."""
    arch, dtype, D, segment, case = "sm_90a", "bfloat16", 64, 64, Case(1, 260, 1, 2, (0, 7, 7, 71, 260), initial=True)
    wide = (64, 64, 64, 128, 1)
    kernels = {stage: built(stage, arch, dtype, D, D, *wide) for stage in ("backward_q", "backward_kv", "carry")}
    kernels["backward_carry"] = built("backward_carry", arch, dtype, D, D, *wide)
    scan, spans = built("scan", arch, dtype, D, D), case.spans(segment)
    given = inputs(case, dtype, D, D)
    leaves = [x.double().requires_grad_() for x in given]
    exact = definition(case, leaves)
    upstream = [torch.randn(x.shape) for x in exact[:3]]
    upstream[0] = upstream[0].to(given[0].dtype)
    loss = sum((x * g.double()).sum() for x, g in zip(exact, upstream, strict=False))
    truth = torch.autograd.grad(loss, leaves)

    q, k, v, o, dout = (flat(x) for x in (*given[:3], exact[0].detach().to(given[0].dtype), upstream[0]))
    den, cu = flat(exact[3].detach()).float(), case.cu_seqlens
    dq, dk, dv = (torch.full((case.T, 2, D), torch.nan, dtype=q.dtype) for _ in range(3))
    delta, scale = unwritten(case.T, 2), (case.phi, 1, case.scale)
    states = run_carry(kernels["carry"], case, given, segment)
    turned = unwritten(spans[0], 2, D, D), unwritten(spans[0], 2, D)
    dz1 = torch.zeros(case.sequences, 2, D)
    dz1[:, :1] = upstream[2]
    dkv0, dz0 = unwritten(case.sequences, 2, D, D), unwritten(case.sequences, 2, D)

    def scanned(kv: Any, z: Any, start: Any, end: Any, reverse: int) -> None:
        matrices = (x.flatten(2) for x in (kv, start[0], end[0]))
        kv, first, last = matrices
        sizes = (case.sequences, case.length, segment)
        scan(kv, z, first, start[1], last, end[1], cu, *sizes, 1, reverse, reverse).assert_clean()

    scanned(*states, given[3:], [x[:0] for x in given[3:]], 0)
    kernels["backward_q"](q, k, v, o, dout, den, dq, delta, *states, cu, *spans, 1, *scale).assert_clean()
    tokens, nothing = (q, k, v, dout, den, delta), [x[:0] for x in turned]
    kernels["backward_carry"](*tokens, dk, dv, *nothing, *turned, cu, *spans, 0, 1, *scale).assert_clean()
    scanned(*turned, (upstream[1], dz1), (dkv0, dz0), 1)
    kernels["backward_kv"](*tokens, dk, dv, *turned, *nothing, cu, *spans, 1, 0, *scale).assert_clean()
    got = (*(x.double().sum(1, keepdim=True) for x in (dq, dk)), dv, dkv0, dz0.sum(1, keepdim=True))
    compare(dict(zip(("dq", "dk", "dv", "dkv", "dz"), got, strict=True)), truth, dtype)


def test_packed_neighbours_do_not_leak():
    """NaN in one sequence changes no bit of the others, though chunks reach over its bounds."""
    K = V = 128
    kernel = built("forward", "sm_90a", "bfloat16", K, V, 64, 128, 2, 256)
    case = Case(1, 100, 1, 1, (0, 33, 80, 100))
    q, k, v, kv, z = inputs(case, "bfloat16", K, V)

    def outputs() -> torch.Tensor:
        o = unwritten(100, 1, V, dtype=v.dtype)
        given = (flat(q), flat(k), flat(v), o, torch.zeros(0, 1), kv[:0], z[:0], kv[:0], z[:0], case.cu_seqlens)
        kernel(*given, *case.spans(), 0, 0, 0, case.phi, *case.normal).assert_clean()
        return o

    before = outputs()
    for x in (q, k, v):
        x[:, 33:80] = torch.nan
    after = outputs()
    assert torch.equal(before[:33], after[:33]) and torch.equal(before[80:], after[80:])
    assert after[33:80].isnan().all()


def test_hopper_instructions():
    source = built("forward", "sm_90a", "bfloat16", 128, 128, 64, 128, 2, 256).kernel_source
    assert all(word in source for word in ("wgmma", "tma_load", "warpgroup_reg_dealloc"))


@pytest.mark.parametrize(
    ("arch", "dtype", "D", "config"),
    [
        ("sm_80", "bfloat16", 64, (64, 64, 1, 128)),
        ("sm_90a", "bfloat16", 128, (64, 128, 2, 256)),
        ("sm_100a", "float32", 48, (32, 64, 1, 256)),
    ],
)
def test_bytes_at_the_floor(arch: str, dtype: str, D: int, config: tuple[int, ...]):
    """Nothing is moved twice, stores fill their sectors, and no line of the loop has conflicts above 2-way."""
    kernel = built("forward", arch, dtype, D, D, *config)
    report = run_forward(kernel, Case(1, 128, 1, 1), dtype, D, D)
    counters = report.counters
    assert counters.traffic_ratio <= 1.01 and counters.total.sector_ratio <= 1.05
    assert max(site.conflict_degree for site in report.sites) <= 2


@pytest.mark.parametrize("arch", ARCHS)
def test_every_size_has_a_config_that_fits(arch: str):
    for kernel in cuda.KERNELS:
        for dtype in DTYPES:
            for K in range(16, 257, 16):
                for V in range(16, 257, 16):
                    p = problem(dtype, K, V)
                    offered = kernel.configs(p, named(arch))
                    # where both do not fit into one program, backward_k and backward_v are two
                    assert offered or kernel.name.endswith("backward_kv"), (kernel.name, p)
                    assert len(set(offered)) == len(offered) <= 4


def test_shared_memory_is_what_is_allocated():
    for arch, dtype, K, V, config in (
        ("sm_80", "bfloat16", 64, 64, (64, 64, 1, 128)),
        ("sm_90a", "bfloat16", 128, 128, (64, 128, 2, 256)),
        ("sm_100a", "float32", 48, 48, (32, 64, 1, 256)),
        ("sm_120a", "float16", 32, 64, (32, 32, 0, 128)),
    ):
        report = run_forward(built("forward", arch, dtype, K, V, *config), Case(1, 1), dtype, K, V)
        bound = cuda.smem_bytes(problem(dtype, K, V), cuda.Config(*config))
        assert bound - SLACK_BYTES <= report.launches[0].shared_bytes <= bound
    kernel, dtype, D, config = "backward_kv", "bfloat16", 64, (64, 64, 64, 128, 1)
    allocated = re.search(r"MaxDynamicSharedMemorySize, (\d+)", built(kernel, "sm_90a", dtype, D, D, *config).source)
    bound = Layout(4 * D, 2 * D, 4 * D).smem_bytes(problem(dtype, D, D), Blocks(*config))
    assert allocated and bound - SLACK_BYTES <= int(allocated[1]) <= bound
