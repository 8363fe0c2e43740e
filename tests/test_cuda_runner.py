"""The CUDA runner of linear attention, with its kernels under the emulator, against the definition.

What the runner decides is tested here: which kernels, which switches, which sizes; that they cover all of an op's
options; and that nothing is launched where there is nothing to do. A launch with a finding fails.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.verify import check_close
from linattn_tl import launchers, spans
from linattn_tl.aligned import pool_strides, ready
from linattn_tl.launchers import CudaLauncher
from linattn_tl.ops.linear_attention.cuda import CudaDecode, CudaRunner
from linattn_tl.ops.linear_attention.definition import Options, TorchRunner, decode, recurrent
from linattn_tl.registry import UnsupportedError
from linattn_tl.spans import check_grid, refuse_sizes
from tests.emulated import BF16, FP32, K, V, awkward, binary, cut_short
from tl_kernels.linear_attention import cuda as kernels
from tl_kernels.spec import Problem

TRUTH = TorchRunner(recurrent)
FULL, ALL = Options(causal=False), (True,) * 5

pytestmark = pytest.mark.usefixtures("nan_filled")


STAGES = tuple(k.name.split(".")[1] for k in kernels.KERNELS)
PIECES = tuple(stage for stage in STAGES if stage != "backward_kv")  # of a problem too large for it


def named(stage: str) -> str:
    return f"linear_attention.{stage}"


def runner(arch: str, dtype: str, stages: Sequence[str] = STAGES, multiprocessors: int = 1) -> CudaRunner:
    """With one multiprocessor nothing is cut."""
    return CudaRunner({name: binary(name, arch, dtype) for name in map(named, stages)}, multiprocessors)


def launches() -> dict[str, int]:
    """Of every binary so far."""
    return {f"{a}.{d}.{s}": binary(named(s), a, d).launches for s in STAGES for a, d in (FP32, BF16)}


def example(
    dtype: str = "float32",
    B: int = 1,
    T: int = 37,
    keys: int | None = None,
    H: int = 1,
    heads: int = 2,
    cu: tuple[int, ...] | None = None,
    state: bool = False,
) -> tuple[list[Any], Any]:
    """(q, k, v, kv, z) and lengths."""
    io, T_k = getattr(torch, dtype), T if keys is None else keys
    N = B if cu is None else len(cu) - 1
    q, k = torch.randn(B, T, H, K).to(io), torch.randn(B, T_k, H, K).to(io)
    v = torch.randn(B, T_k, H * heads, V).to(io)
    states = (torch.randn(N, H * heads, K, V), torch.rand(N, H, K) * 3) if state else (None, None)
    return [q, k, v, *states], None if cu is None else torch.tensor(cu)


def exact(inputs: Sequence[Any], lengths: Any, opt: Options, upstream: Sequence[Any] | None = None) -> tuple[Any, Any]:
    """Outputs and gradients of all inputs in float64."""
    leaves = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    outputs, _ = TRUTH.forward(leaves, lengths, opt._replace(output_final_state=True))
    if upstream is None:
        return [x.detach() for x in outputs], None
    pairs = [(x, g.double()) for x, g in zip(outputs, upstream, strict=True) if g is not None and x.requires_grad]
    wanted = [x for x in leaves if x is not None]
    found: Any = iter(torch.autograd.grad([x for x, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    grads = [None if x is None else next(found) for x in leaves]
    grads = [None if x is None else torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    return [x.detach() for x in outputs], grads


def check(
    run: CudaRunner,
    inputs: Sequence[Any],
    lengths: Any,
    opt: Options,
    *subsets: Sequence[bool],
    outputs_only: bool = False,
    states_only: bool = False,
) -> None:
    """Forward, and backward for each subset of gradients, are within the caps, in their inputs' dtypes."""
    dtype = str(inputs[0].dtype).removeprefix("torch.")
    results, saved = run.forward(inputs, lengths, opt)
    wanted = exact(inputs, lengths, opt)[0]
    upstream = [None if states_only else torch.randn(wanted[0].shape).to(inputs[2].dtype), None, None]
    if opt.output_final_state and not outputs_only:
        upstream[1:] = [torch.randn(x.shape) for x in wanted[1:]]
    grads = exact(inputs, lengths, opt, upstream)[1]
    for name, x, truth in zip(("o", "kv", "z"), results, wanted, strict=True):
        assert (x is not None) == (name == "o" or opt.output_final_state)
        if x is not None:
            assert x.dtype == (inputs[2].dtype if name == "o" else torch.float32)
            check_close(name, x, truth, dtype=dtype)
    # as the library op does, where an empty tensor stands for none
    o, *results = results
    results, saved, upstream = (
        [None if x is None or not x.numel() else x for x in xs] for xs in (results, saved, upstream)
    )
    for wants in subsets or (ALL,):
        needs = [want and x is not None for want, x in zip(wants, inputs, strict=True)]
        found = run.backward(inputs, [o, *results], saved, lengths, upstream, needs, opt)
        names = ("dq", "dk", "dv", "dkv", "dz")
        for name, x, given, truth, need in zip(names, found, inputs, grads, needs, strict=True):
            assert (x is not None) == need, (name, needs)
            if x is not None:
                assert x.dtype == given.dtype, name
                check_close(name, x, truth, dtype=dtype)


# ---- one pass


@pytest.mark.parametrize(("arch", "dtype"), [FP32, BF16])
@pytest.mark.parametrize("T", [1, 37, 100])
def test_causal(arch: str, dtype: str, T: int):
    inputs, lengths = example(dtype, B=2 if T == 37 else 1, T=T, H=1 + (T == 37), state=T != 100)
    check(runner(arch, dtype), inputs, lengths, Options(scale=0.5, output_final_state=T != 37))


@pytest.mark.parametrize(("arch", "dtype"), [FP32, BF16])
@pytest.mark.parametrize("causal", [True, False])
def test_packed(arch: str, dtype: str, causal: bool):
    cu = (0, 0, 7, 7, 71, 100, 100)
    inputs, lengths = example(dtype, T=100, cu=cu, state=True)
    check(runner(arch, dtype), inputs, lengths, Options(causal=causal, scale=0.5, output_final_state=True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("feature_map", "normalize", "eps"),
    [("relu", True, 0.1), ("relu", False, 1e-6), ("identity", False, 1e-6), ("elu1", False, 1e-6)],
)
def test_options(feature_map: str, normalize: bool, eps: float, causal: bool):
    inputs, lengths = example(H=2, heads=1, state=True)
    check(runner(*FP32), inputs, lengths, Options(feature_map, causal, normalize, 0.3, eps, output_final_state=True))


@pytest.mark.parametrize(("arch", "dtype"), [FP32, BF16])
@pytest.mark.parametrize("keys", [37, 70, 1])
def test_all_keys(arch: str, dtype: str, keys: int):
    inputs, lengths = example(dtype, B=2, keys=keys, state=keys != 37)
    check(runner(arch, dtype), inputs, lengths, FULL._replace(scale=0.5, output_final_state=keys == 70))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("only", ["outputs", "states"])
def test_gradients_of_outputs_or_states_alone(only: str, causal: bool):
    inputs, lengths = example(state=True)
    opt = Options(causal=causal, output_final_state=True)
    check(runner(*FP32), inputs, lengths, opt, outputs_only=only == "outputs", states_only=only == "states")


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_every_subset_of_gradients(causal: bool, normalize: bool):
    inputs, lengths = example(T=5, state=True)
    opt = Options(causal=causal, normalize=normalize, output_final_state=True)
    check(runner(*FP32), inputs, lengths, opt, *product((True, False), repeat=5))


def test_only_what_is_wanted_is_launched():
    """One kernel makes dk and dv; without a normaliser their gradients do not wait for that of q."""
    inputs, lengths = example(T=20)
    for normalize, needs, names in (
        (True, (True, False, False), {"backward_q"}),
        (True, (True, True, True), {"backward_q", "backward_kv"}),
        (False, (False, True, True), {"backward_kv"}),
        (False, (False, False, True), {"backward_v"}),
        (False, (False, True, False), {"backward_k"}),
    ):
        opt = Options(normalize=normalize)
        run = runner(*FP32)
        results, saved = run.forward(inputs, lengths, opt)
        before = launches()
        grads = (torch.ones_like(results[0]), None, None)
        run.backward(inputs, results, saved, lengths, grads, (*needs, False, False), opt)
        assert {n.split(".")[2] for n, count in launches().items() if count > before[n]} == names


@pytest.mark.parametrize("needs", [ALL, (False, False, True, True, True), (False, True, True, False, False)])
def test_without_a_kernel_for_both(needs: tuple[bool, ...]):
    inputs, lengths = example(state=True)
    check(runner(*FP32, PIECES), inputs, lengths, Options(output_final_state=True), needs)


# ---- spans


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_short(monkeypatch)


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize(("arch", "dtype"), [FP32, BF16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cu", [None, (0, 0, 7, 7, 71, 100, 100)])
def test_spans(arch: str, dtype: str, causal: bool, cu: tuple[int, ...] | None):
    inputs, lengths = example(dtype, T=100, cu=cu, state=True)
    run = runner(arch, dtype, multiprocessors=64)
    before = launches()
    check(run, inputs, lengths, Options(causal=causal, scale=0.5, output_final_state=True))
    name = f"{arch}.{dtype}.scan"
    assert launches()[name] - before[name] == (3 if causal else 2)


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize("causal", [True, False])
def test_spans_without_states(causal: bool):
    inputs, lengths = example(B=2, T=50)
    run = runner(*FP32, multiprocessors=64)
    check(run, inputs, lengths, Options(causal=causal))
    assert all(walk.cut for walk in run._walks.values())
    check(run, inputs, lengths, Options(causal=causal), (False, True, False, False, False))


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize("needs", [ALL, (False, False, True, True, True), (False, False, False, True, True)])
def test_spans_without_a_kernel_for_both(needs: tuple[bool, ...]):
    inputs, lengths = example(T=50, state=True)
    check(runner(*FP32, PIECES, 64), inputs, lengths, Options(output_final_state=True), needs)


def test_where_spans_are_cut():
    """Long sequences that leave more than half of the multiprocessors idle, and no others."""
    assert spans.carried_segment(1, 65536, 8, 132) == 2048  # 32 spans of 8 heads: 2 programs a multiprocessor
    assert spans.carried_segment(1, 8192, 1, 132) == spans.CARRIED_TOKENS
    assert spans.carried_segment(1, 2047, 1, 132) == 0  # too short
    assert spans.carried_segment(32, 65536, 8, 132) == 0  # enough programs
    assert spans.carried_segment(8, 8192, 1, 132) == 0  # enough for each sequence alone
    assert spans.carried_segment(0, 0, 1, 132) == 0
    assert spans.spread_segment(4096, 1, 132) == spans.SPREAD_TOKENS
    assert spans.spread_segment(65536, 512, 132) >= 65536
    for tokens, programs in product((1, 100, 4097, 100_000), (1, 7, 64)):
        segment = spans.carried_segment(1, tokens, programs, 108)
        assert segment % spans.SPAN_MULTIPLE == 0 and segment <= tokens
        assert spans.spread_segment(tokens, programs, 108) % spans.SPAN_MULTIPLE == 0


# ---- nothing to do, and what a kernel cannot read


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}, {"T": 0, "cu": (0, 0, 0)}, {"T": 0, "cu": (0,)}])
def test_without_tokens_nothing_is_launched(sizes: dict[str, Any], causal: bool):
    before = launches()
    opt = Options(causal=causal, output_final_state=True)
    for state in (True, False):
        inputs, lengths = example(**sizes, state=state)
        check(runner(*FP32, multiprocessors=64), inputs, lengths, opt)
        results, _ = runner(*FP32).forward(inputs, lengths, opt)
        for x, given in zip(results[1:], inputs[3:], strict=True):
            assert torch.equal(x, torch.zeros_like(x) if given is None else given)
            assert given is None or x.numel() == 0 or x.data_ptr() != given.data_ptr()
    assert launches() == before


@pytest.mark.parametrize(("T", "keys"), [(9, 0), (0, 9)])
@pytest.mark.parametrize("state", [True, False])
def test_without_queries_or_keys(T: int, keys: int, state: bool):
    inputs, lengths = example(T=T, keys=keys, state=state)
    check(runner(*FP32), inputs, lengths, FULL._replace(output_final_state=True, eps=0.1))


@pytest.mark.parametrize("how", ["strided", "transposed", "negated", "misaligned"])
def test_awkward_memory(how: str):
    inputs, _ = example(T=20, cu=(0, 5, 20), state=True)
    lengths = torch.tensor([9, 0, 5, 20], dtype=torch.int32)[1:]  # misaligned
    opt = Options(output_final_state=True)
    given = [awkward(x, how) for x in inputs]
    assert not any(ready(x) for x in given)
    check(runner(*FP32), given, lengths, opt)
    results, saved = runner(*FP32).forward(inputs, lengths, opt)
    grads = [torch.randn(x.shape) for x in results]
    plain = runner(*FP32).backward(inputs, results, saved, lengths, grads, ALL, opt)
    other = runner(*FP32).backward(given, results, saved, lengths, [awkward(x, how) for x in grads], ALL, opt)
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def test_inputs_are_left_alone_and_results_repeat():
    inputs, lengths = example(T=20, state=True)
    before, opt = [x.clone() for x in inputs], Options(output_final_state=True)
    first, saved = runner(*FP32).forward(inputs, lengths, opt)
    second, none = runner(*FP32).forward(inputs, lengths, opt, keep=False)
    assert none == (None, None, None) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    grads = [torch.randn(x.shape) for x in first]
    found = [runner(*FP32).backward(inputs, first, saved, lengths, grads, ALL, opt) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


def test_grids_beyond_the_limit_are_refused():
    x = torch.zeros(1, 1, 65536, K).expand(1, 1, 65536, K)
    with pytest.raises(UnsupportedError, match=r"forward would have a grid of 1 x 65536 \(HV\)"):
        runner(*FP32).forward((x, x, x, None, None), None, Options())
    with pytest.raises(UnsupportedError, match="grid of 2147483648 x 1"):
        check_grid("linear_attention", "forward", 1, 2**31)
    with pytest.raises(UnsupportedError, match="grid of 1073741824 x 2"):  # one axis for both
        check_grid("linear_attention", "forward", 2, 2**30)


@pytest.mark.parametrize(
    ("dtype", "k", "v", "reason"),
    [
        ("bfloat16", 16, 256, None),
        ("float64", 64, 64, "dtype float64 is not one of"),
        ("float32", 40, 64, "K=40; CUDA kernels take multiples of 16 up to 256"),
        ("float32", 64, 272, "V=272;"),
        ("float32", 0, 64, "K=0;"),
    ],
)
def test_refused_sizes(dtype: str, k: int, v: int, reason: str | None):
    said = refuse_sizes(Problem("linear_attention", dtype, k, v, "cuda"))
    assert said is None if reason is None else reason in (said or "")


# ---- decode


def check_decode(
    run: CudaDecode, n: int | None = 1, heads: int = 2, slots: Any = None, opt: Options | None = None, how: str = ""
) -> None:
    B, rows = 3, 3 if slots is None else 5
    (q, k, v, _, _), _ = example(B=B, T=1 if n is None else n, heads=heads)
    (_, _, _, kv, z), _ = example(B=rows, T=1, heads=heads, state=True)
    if n is None:
        q, k, v = q[:, 0], k[:, 0], v[:, 0]
    out, opt = torch.full_like(v, float("nan")), opt or Options()
    if how:
        q, k, v, kv, z, out = (awkward(x, how) for x in (q, k, v, kv, z, out))
    picked = None if slots is None else torch.tensor(slots)
    want_kv, want_z, want = kv.double(), z.double(), torch.zeros(v.shape, dtype=torch.float64)
    decode(q.double(), k.double(), v.double(), want_kv, want_z, picked, opt, want)
    assert run(q, k, v, kv, z, picked, opt, out) is out
    for name, x, truth in (("o", out, want), ("kv", kv, want_kv), ("z", z, want_z)):
        check_close(name, x, truth, dtype="float32")


def decoder() -> CudaDecode:
    return CudaDecode({"linear_attention.decode": binary(named("decode"), *FP32)})


def test_decode():
    check_decode(decoder())
    check_decode(decoder(), None)
    check_decode(decoder(), 3, heads=1, slots=[4, -1, 0])
    check_decode(decoder(), 2, opt=Options("identity", normalize=False, scale=0.3))
    check_decode(decoder(), 2, opt=Options("relu", eps=0.1), slots=[2, 1, 3])


@pytest.mark.parametrize("how", ["strided", "transposed", "negated", "misaligned"])
def test_decode_in_awkward_memory(how: str):
    check_decode(decoder(), 2, slots=[4, -1, 0], how=how)


def pools(layout: str, rows: int = 5, H: int = 2, HV: int = 4) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """kv and z within larger memory of NaN, and that memory."""
    nan, K_ = float("nan"), K
    if layout == "layer":  # [P, layers, heads, ...], as one allocation for a model has it
        whole = [torch.full((rows, 3, HV, K_, V), nan), torch.full((rows, 3, H, K_), nan)]
        kv, z = (x[:, 1] for x in whole)
    elif layout == "heads":  # one of two ranks' share
        whole = [torch.full((rows, 2 * HV, K_, V), nan), torch.full((rows, 2 * H, K_), nan)]
        kv, z = whole[0][:, HV:], whole[1][:, H:]
    elif layout == "head first":
        whole = [torch.full((HV, rows, K_, V), nan), torch.full((H, rows, K_), nan)]
        kv, z = (x.transpose(0, 1) for x in whole)
    elif layout == "one head, one row":  # strides that torch keeps and nobody uses
        whole = [torch.full((HV * K_ * V,), nan), torch.full((H * K_,), nan)]
        kv, z = whole[0].as_strided((1, 1, K_, V), (7, 3, V, 1)), whole[1].as_strided((1, 1, K_), (5, 1, 1))
    else:
        raise ValueError(layout)
    kv.copy_(torch.randn(kv.shape))
    z.copy_(torch.rand(z.shape) * 3)
    return kv, z, whole


@pytest.mark.parametrize(
    ("layout", "slots"),
    [("layer", [4, -1, 0]), ("heads", [2, 3, 1]), ("head first", None), ("one head, one row", None)],
)
def test_decode_in_a_part_of_a_larger_pool(layout: str, slots: list[int] | None, monkeypatch: pytest.MonkeyPatch):
    """In place, with nothing copied and nothing around it touched."""
    rows, H, heads = (1, 1, 1) if layout == "one head, one row" else (5 if slots else 3, 2, 2)
    kv, z, whole = pools(layout, rows, H, H * heads)
    (q, k, v, _, _), _ = example(B=3 if rows > 1 else 1, T=2, H=H, heads=heads)
    before, picked = [x.clone() for x in whole], None if slots is None else torch.tensor(slots)
    want_kv, want_z, want = kv.double(), z.double(), torch.zeros(v.shape, dtype=torch.float64)
    decode(q.double(), k.double(), v.double(), want_kv, want_z, picked, Options(), want)
    monkeypatch.setattr(CudaDecode, "_copied", None)
    out = torch.full_like(v, float("nan"))
    assert decoder()(q, k, v, kv, z, picked, Options(), out) is out
    for name, x, truth in (("o", out, want), ("kv", kv, want_kv), ("z", z, want_z)):
        check_close(name, x, truth, dtype="float32")
    for x, was in zip(whole, before, strict=True):
        assert torch.equal(x.isnan(), was.isnan())


def test_pools_that_decode_cannot_reach_in_place():
    base = torch.zeros(3, 4, K, V)
    assert pool_strides(base) == (4 * K * V, K * V)
    assert pool_strides(base[:, ::2]) == (4 * K * V, 2 * K * V)
    assert pool_strides(base[:0]) is not None
    for x in (
        base.transpose(2, 3),
        base[..., ::2],
        base[:1].expand(3, 4, K, V),  # rows share memory
        base.as_strided((2, 2, K, V), (K * V, K * V, V, 1)),
        torch.zeros(9 * K * V).as_strided((2, 2, K, V), (4 * K * V, K * V + 2, V, 1)),  # a head begins between vectors
    ):
        assert pool_strides(x) is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_decode_with_slots_that_are_no_rows(dtype: torch.dtype):
    """o is NaN there, no state is touched, and nothing outside the pools is read; int64 is not cut to 32 bits."""
    slots = [-2, 1, 5, 2**31 - 1, -(2**31), -1]
    if dtype is torch.int64:
        slots += [2**32 + 2, 2**32 - 1, 2**63 - 1, -(2**32) + 3, -(2**63)]
    n = len(slots)
    (q, k, v, _, _), _ = example(B=n, T=2)
    (_, _, _, kv, z), _ = example(B=5, T=1, state=True)
    states, out = [kv.clone(), z.clone()], torch.zeros_like(v)
    decoder()(q, k, v, kv, z, torch.tensor(slots, dtype=dtype), Options(), out)
    assert [bool(x.isnan().all()) for x in out] == [slot not in (1, -1) for slot in slots]
    assert (out[slots.index(-1)] == 0).all() and not out[1].isnan().any()
    for x, was in zip((kv, z), states, strict=True):
        assert [torch.equal(a, b) for a, b in zip(x, was, strict=True)] == [True, False, True, True, True]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_in_awkward_memory(dtype: torch.dtype):
    """Misaligned, and with gaps."""
    for slots in (torch.tensor([9, 4, -1, 0], dtype=dtype)[1:], torch.tensor([4, 9, -1, 9, 0, 9], dtype=dtype)[::2]):
        (q, k, v, _, _), _ = example(B=3, T=1)
        (_, _, _, kv, z), _ = example(B=5, T=1, state=True)
        want_kv, want_z, want = kv.double(), z.double(), torch.zeros(v.shape, dtype=torch.float64)
        decode(q.double(), k.double(), v.double(), want_kv, want_z, slots, Options(), want)
        check_close("o", decoder()(q, k, v, kv, z, slots, Options(), torch.empty_like(v)), want)
        check_close("kv", kv, want_kv)


def test_offsets_into_a_pool_have_64_bits():
    """A pool may have more than 2^31 elements."""
    launcher = binary(named("decode"), *FP32).launcher
    assert {s.name: s.c_type for s in launcher.lowered.symbols}["kv_rows"] == "int64_t"
    stored = [line for line in launcher.lowered.kernel_source.splitlines() if "kv_rows))" in line]
    assert stored and all("((int64_t)row) * kv_rows" in line for line in stored)


def test_decode_over_its_own_input():
    """Each program reads all of q, so that none may write o there."""
    (q, k, v, _, _), _ = example(B=2, T=1, heads=1)
    (_, _, _, kv, z), _ = example(B=2, T=1, heads=1, state=True)
    want = torch.zeros(v.shape, dtype=torch.float64)
    decode(q.double(), k.double(), v.double(), kv.double(), z.double(), None, Options(), want)
    assert decoder()(q, k, v, kv, z, None, Options(), q) is q
    check_close("o", q, want)


def test_decode_without_tokens_launches_nothing():
    before = launches()
    for B, T in ((0, 1), (2, 0)):
        (q, k, v, _, _), _ = example(B=B, T=T)
        (_, _, _, kv, z), _ = example(B=2, T=1, state=True)
        assert decoder()(q, k, v, kv, z, None, Options(), v).numel() == 0
    assert launches() == before


# ---- the launcher of a real binary


class Recorded:
    """As much of a CudaBinary as a launcher uses."""

    def __init__(self, tensors: Sequence[str] = (), numbers: Sequence[str] = ("eps", "spans", "H")) -> None:
        self.tensors, self.numbers = tensors, numbers
        self.blocks: list[Any] = []
        self.status = 0

    def addresses(self, *words: int) -> tuple[Any, ...]:
        return words

    def fixed(self, *numbers: float) -> tuple[Any, ...]:
        return numbers

    def entry(self, block: Any) -> int:
        self.blocks.append(block)
        return self.status

    def fail(self, status: int) -> None:
        raise ValueError(f"status {status}")


@pytest.fixture
def stream_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "current_stream", lambda device: 7000 + device)


@pytest.mark.usefixtures("stream_of")
def test_a_binary_gets_its_numbers_in_order_and_the_current_stream():
    recorded: Any = Recorded()
    launcher = CudaLauncher(recorded, None)
    packed = launcher.pack({"H": 2, "spans": 3, "eps": 0.5, "other": 9})
    q = torch.zeros(4)
    launcher.launch(packed, (q, None))
    assert recorded.blocks == [(-1, 6999, q.data_ptr(), 0, 0.5, 3, 2)]
    with pytest.raises(KeyError, match="spans"):
        launcher.pack({"H": 2, "eps": 0.5})
    recorded.status = 2
    with pytest.raises(ValueError, match="status 2"):
        launcher.launch(packed, (q, None))


DECODE_NUMBERS = ("P", "kv_rows", "kv_heads", "z_rows", "z_heads", "M", "use_slots")


class NothingRead(TorchDispatchMode):
    """No value of a tensor goes to the host: on a GPU that waits for it, and ends a capture."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket._qualified_op_name not in (
            "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::masked_select",
        ), func  # fmt: skip
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("stream_of")
@pytest.mark.parametrize("how", ["", "strided", "misaligned"])
def test_decode_reads_nothing_from_the_device(how: str):
    recorded: Any = Recorded(numbers=DECODE_NUMBERS)
    run = CudaDecode({"linear_attention.decode": CudaLauncher(recorded, binary(named("decode"), *FP32).config)})
    (q, k, v, _, _), _ = example(B=3, T=1)
    (_, _, _, kv, z), _ = example(B=3, T=1, state=True)
    if how:
        q, k, v, kv, z = (awkward(x, how) for x in (q, k, v, kv, z))
    with NothingRead():
        for slots in (None, torch.tensor([9, 0, 1]), torch.tensor([9, 0, 1, 2], dtype=torch.int32)[1:]):
            run(q, k, v, kv, z, slots, Options(), v.clone())
    assert [block[-2:] for block in recorded.blocks] == [(0, 0), (6, 2), (3, 1)]


@pytest.mark.usefixtures("stream_of")
def test_states_that_lie_side_by_side():
    """kv and z of a row in one piece."""
    recorded: Any = Recorded(numbers=DECODE_NUMBERS)
    run = CudaDecode({"linear_attention.decode": CudaLauncher(recorded, binary(named("decode"), *FP32).config)})
    (q, k, v, _, _), _ = example(B=3, T=1)
    row = 2 * K * V + K
    whole = torch.zeros(5, row)
    kv, z = whole[:, : 2 * K * V].view(5, 2, K, V), whole[:, 2 * K * V :].view(5, 1, K)
    out = torch.empty_like(v)
    run(q, k, v, kv, z, torch.arange(3), Options(), out)
    (block,) = recorded.blocks
    at = [x.data_ptr() for x in (q, k, v, out, kv, z)]
    assert list(block[2:8]) == at and list(block[9:]) == [5, row, K * V, row, K, 6, 2]


@pytest.mark.usefixtures("stream_of")
@pytest.mark.parametrize("cu", [None, (0, 20)])
def test_a_pass_hands_over_what_it_returns(cu: tuple[int, ...] | None):
    """Every tensor at its place, whichever way the launch is prepared, and 0 for one that is missing."""
    recorded: Any = Recorded(numbers=("rows", "initial", "final"))
    run = CudaRunner({"linear_attention.forward": CudaLauncher(recorded, binary(named("forward"), *FP32).config)}, 1)
    for keep, final, state in product((True, False), repeat=3):
        inputs, lengths = example(T=20, cu=cu, state=state)
        lengths = None if lengths is None else lengths.int()
        (o, *states), (den, _, _) = run.forward(inputs, lengths, Options(output_final_state=final), keep)
        given = [*inputs[:3], o, den, *inputs[3:], *states, lengths]
        assert (den is not None, states[0] is not None) == (keep, final)
        words = [0 if x is None else x.data_ptr() for x in given]
        assert list(recorded.blocks[-1][2:]) == [*words, 20 * keep, int(state), int(final)]
    assert len(recorded.blocks) == 8


@pytest.mark.usefixtures("stream_of")
def test_a_kept_plan_is_for_its_layout_alone():
    """The same shapes in other memory, one after the other."""
    recorded: Any = Recorded(numbers=DECODE_NUMBERS)
    run = CudaDecode({"linear_attention.decode": CudaLauncher(recorded, binary(named("decode"), *FP32).config)})
    (q, k, v, _, _), _ = example(B=2, T=1)
    kv, z, wide = torch.zeros(2, 2, K, V), torch.zeros(2, 1, K), torch.zeros(2, 3, 2, K, V)
    for pool in (kv, wide[:, 1], kv, wide[:, 2]):
        run(q, k, v, pool, z, None, Options(), torch.empty_like(v))
    assert [block[10] for block in recorded.blocks] == [2 * K * V, 6 * K * V, 2 * K * V, 6 * K * V]
