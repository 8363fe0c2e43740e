"""The delta rule on CUDA: its kernels and its runners under the emulator, against the definition."""

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from autotune import target
from autotune.target import SHARED_LIMIT
from autotune.verify import VerificationError, check_close
from linattn_tl import UnsupportedError, trials
from linattn_tl.ops.delta_rule import trial_cuda
from linattn_tl.ops.delta_rule.cuda import CudaDecode, CudaRunner
from linattn_tl.ops.delta_rule.definition import Options, TorchRunner, decode, normalized, recurrent
from linattn_tl.plain import each
from linattn_tl.truths import truth
from tests.emulated import BF16, FP32, K, V, awkward, binary, cut_short, launcher, lowered
from tl_kernels.cuda_sizes import Blocks
from tl_kernels.delta_rule.cuda import BACKWARD, FORWARD, KERNELS, PASSES
from tl_kernels.delta_rule.cuda_sizes import LAYOUTS
from tl_kernels.spec import DTYPES, Kernel, Problem

GRADS = ("dq", "dk", "dv", "dg", "dbeta", "dstate")

pytestmark = pytest.mark.usefixtures("nan_filled")


def problem(dtype: str, k: int = K, v: int = V) -> Problem:
    return Problem("delta_rule", dtype, k, v, "cuda")


@pytest.mark.parametrize(
    ("arch", "dtype", "k", "v"),
    [
        ("sm_80", "float32", K, V),
        ("sm_90a", "bfloat16", K, V),
        ("sm_90a", "bfloat16", 128, 128),
        ("sm_86", "float16", 32, 80),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_conformance(kernel: Kernel, arch: str, dtype: str, k: int, v: int):
    p = problem(dtype, k, v)
    trial_cuda.check(kernel, p, launcher(kernel, p, arch))


@pytest.mark.parametrize(
    ("kernel", "arch", "dtype", "size", "config"),
    [
        (FORWARD, "sm_80", "bfloat16", 64, (64, 64, 32, 128, 0)),  # more than one block of V, nothing ahead
        (FORWARD, "sm_120a", "bfloat16", 192, (32, 256, 64, 256, 0)),  # a K that is padded
        (BACKWARD, "sm_100a", "bfloat16", 64, (32, 64, 32, 128, 1)),
        (BACKWARD, "sm_90a", "float32", 48, (32, 64, 32, 128, 0)),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_other_schedules(kernel: Kernel, arch: str, dtype: str, size: int, config: tuple[int, ...]):
    p = problem(dtype, size, size)
    trial_cuda.check(kernel, p, launcher(kernel, p, arch, Blocks(*config)))


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_backward_reads_the_states_that_forward_leaves(arch: str):
    """Each config of forward can leave the states that each config of backward reads, and so can those in chunks."""
    for dtype in DTYPES:
        for D in (32, 64, 96, 128, 256):
            forward, backward = (k.configs(problem(dtype, D, D), target.named(arch)) for k in (FORWARD, BACKWARD))
            assert all(b.C % f.C == 0 for f in forward for b in backward)
            offered = [k.configs(problem(dtype, D, D), target.named(arch)) for k in PASSES if k is not FORWARD]
            assert len({c.C for found in offered for c in found}) == int(bool(forward))
            assert sum(map(bool, offered)) == 3 * bool(forward) + 3 * bool(backward)
            assert forward or not backward


@pytest.mark.parametrize("kernel", PASSES, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("arch", "dtype", "size"), [("sm_90a", "bfloat16", 128), ("sm_80", "float32", 32)])
def test_what_is_allocated_fits(kernel: Kernel, arch: str, dtype: str, size: int):
    """What a config is said to need is a bound on what is allocated."""
    p, layout = problem(dtype, size, size), LAYOUTS[kernel.name.split(".")[1]]
    config = kernel.configs(p, target.named(arch))[0]
    found = re.search(r"MaxDynamicSharedMemorySize, (\d+)", lowered(kernel, p, config, arch).source)
    assert found and int(found[1]) <= layout(p, config.BK, config.BV).smem_bytes(p, config)


class Wrong:
    """The right kernel, and a change to what it leaves."""

    def __init__(self, stage: str, name: str, by: float):
        self.right, self.name, self.by = binary(f"delta_rule.{stage}", *FP32), name, by
        self.config, self.kept = self.right.config, {}
        step = ("q", "k", "v", "g", "beta", "o", "kv", "slots")
        self.names = step if stage == "decode" else trial_cuda.TENSORS[stage]

    def pack(self, numbers: Any) -> Any:
        return self.right.pack(numbers)

    def launch(self, packed: Any, tensors: Sequence[Any]) -> None:
        self.right.launch(packed, tensors)
        changed = dict(zip(self.names, tensors, strict=True))[self.name]
        if changed is not None:
            changed.mul_(self.by)


@pytest.mark.parametrize(
    ("stage", "name", "said"),
    [
        ("decode", "o", "o has relative RMS error"),
        ("decode", "kv", "kv has relative RMS error"),
        ("forward", "o", "o has relative RMS error"),
        ("forward", "kv1", "kv1 has relative RMS error"),
        ("forward", "y", "y has relative RMS error"),
        ("forward", "states", "states has relative RMS error"),
        ("forward", "k", "k changed in"),
        *(("backward", name, f"{name} has relative RMS error") for name in (*GRADS[:5], "dkv0")),
        ("backward", "states", "states changed in"),
        *(("prepare", name, f"{name} has relative RMS error") for name in ("y0", "w")),
        *(("carry", name, f"{name} has relative RMS error") for name in ("y", "states", "kv1")),
        ("carry", "y0", "y0 changed in"),
        ("output", "o", "o has relative RMS error"),
        *(("prepare_back", name, f"{name} has relative RMS error") for name in ("x0", "back")),
        *(("carry_back", name, f"{name} has relative RMS error") for name in ("behind", "dkv0")),
    ],
)
def test_a_wrong_kernel_does_not_pass(stage: str, name: str, said: str):
    kernel = trials.find_kernel(f"delta_rule.{stage}", "cuda")[1]
    with pytest.raises(VerificationError, match=said):
        trial_cuda.check(kernel, problem("float32"), Wrong(stage, name, 1.001))  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_workload(kernel: Kernel):
    run = binary(kernel.name, *FP32)
    before = run.launches
    work = trial_cuda.workload(kernel, problem("float32"), run, tokens=64, batch=1, heads=1)  # type: ignore[arg-type]
    work.call()
    assert run.launches == before + 1 and work.bytes > 0


# ---- whole sequences


def runner(arch: str, dtype: str) -> CudaRunner:
    return CudaRunner({kernel.name: binary(kernel.name, arch, dtype) for kernel in PASSES}, 132)


def tokens(
    dtype: str = "float32", B: int = 1, T: int = 37, gated: bool = True, state: bool = False, sequences: int = 0
) -> list[Any]:
    """q, k, v, g or None, beta, initial states or None; two value heads to a q/k head."""
    torch.manual_seed(0)
    io, N = getattr(torch, dtype), sequences or B
    q, k = torch.randn(B, T, 1, K), normalized(torch.randn(B, T, 1, K))
    g = -(torch.rand(B, T, 2) ** 3) if gated else None
    start = torch.randn(N, 2, K, V) if state else None
    return [q.to(io), k.to(io), torch.randn(B, T, 2, V).to(io), g, 2 * torch.rand(B, T, 2), start]


def check(run: CudaRunner, inputs: list[Any], opt: Options, cu: tuple[int, ...] | None = None) -> None:
    """Forward, and the gradients: from what forward has kept, and without."""
    dtype, lengths = str(inputs[0].dtype).removeprefix("torch."), None if cu is None else torch.tensor(cu)
    exact = truth(TorchRunner(recurrent), inputs, lengths, opt)
    results, saved = run.forward(inputs, lengths, opt)
    for name, x, want in zip(("o", "state"), results, exact.outputs, strict=True):
        assert (x is not None) == (name == "o" or opt.output_final_state)
        if x is not None:
            check_close(name, x, want, dtype=dtype)
    needs = [x is not None for x in inputs]
    for kept in (saved, ()) if saved else ((),):
        found = run.backward(inputs, results, kept, lengths, exact.upstream, needs, opt)
        for name, x, want, given in zip(GRADS, found, exact.grads, inputs, strict=True):
            assert (x is None) == (given is None), name
            if x is not None:
                assert x.dtype is given.dtype and x.shape == given.shape
                check_close(name, x, torch.zeros_like(x).double() if want is None else want, dtype=dtype)


@pytest.mark.parametrize(("arch", "dtype"), [FP32, BF16])
@pytest.mark.parametrize("T", [1, 37, 100])
def test_pass(arch: str, dtype: str, T: int):
    inputs = tokens(dtype, B=2 if T == 37 else 1, T=T, gated=T != 100, state=T != 100)
    check(runner(arch, dtype), inputs, Options(0.5, T == 1, output_final_state=T != 37))


@pytest.mark.parametrize(("arch", "dtype"), [FP32, BF16])
def test_packed(arch: str, dtype: str):
    cu = (0, 0, 7, 7, 71, 100, 100)
    check(runner(arch, dtype), tokens(dtype, T=100, state=True, sequences=6), Options(0.5, True, True), cu)


@pytest.mark.parametrize(("arch", "dtype"), [FP32, BF16])
@pytest.mark.parametrize("cu", [None, (0, 0, 7, 140, 260)])
@pytest.mark.parametrize("gated", [True, False])
def test_few_heads_and_long_sequences(
    gated: bool, cu: tuple[int, ...] | None, arch: str, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    """What chunks can do at once is done at once, and leaves backward what it reads."""
    cut_short(monkeypatch, 64)
    inputs = tokens(dtype, T=cu[-1] if cu else 150, gated=gated, state=True, sequences=4 if cu else 1)
    launched = {kernel.name: binary(kernel.name, arch, dtype).launches for kernel in PASSES}
    check(runner(arch, dtype), inputs, Options(0.5, not gated, output_final_state=True), cu)
    changed = {name: binary(name, arch, dtype).launches - before for name, before in launched.items()}
    # the second time, since nothing was kept
    assert changed == {kernel.name: 2 * (kernel is not FORWARD) for kernel in PASSES}


def test_when_chunks_are_done_at_once():
    def cut(B: int, T: int, HV: int) -> bool:
        q, v = torch.empty(B, T, 1, K, device="meta"), torch.empty(B, T, HV, V, device="meta")
        return runner(*FP32)._walk("forward", q, v, None).cut

    assert cut(1, 4096, 2) and cut(1, 4096, 66) and cut(8, 4096, 4)
    assert not cut(1, 1024, 2) and not cut(1, 4096, 67) and not cut(16, 4096, 16)


def test_beta_of_one_and_no_decay_for_long(monkeypatch: pytest.MonkeyPatch):
    """Nothing is forgotten: errors of a chunk stay in the state. In one walk, and in chunks at once."""
    inputs, opt = tokens(T=600, gated=False), Options(0.5, output_final_state=True)
    inputs[4] = torch.ones_like(inputs[4])
    (want, final), _ = TorchRunner(recurrent).forward(each(torch.Tensor.double, *inputs), None, opt)
    found = [runner(*FP32).forward(inputs, None, opt)[0]]
    cut_short(monkeypatch, 64)
    before = binary("delta_rule.carry", *FP32).launches
    found.append(runner(*FP32).forward(inputs, None, opt)[0])
    assert binary("delta_rule.carry", *FP32).launches == before + 1
    for o, state in found:
        check_close("o", o, want, dtype="float32")
        check_close("state", state, final, dtype="float32")


def test_every_subset_of_gradients():
    """Each is what it is among all; one that is not wanted is not there."""
    inputs, opt, run = tokens(T=20, state=True), Options(0.5, output_final_state=True), runner(*FP32)
    results, saved = run.forward(inputs, None, opt)
    upstream = each(torch.randn_like, *results)
    every = run.backward(inputs, results, saved, None, upstream, [True] * 6, opt)
    for needs in product((True, False), repeat=6):
        found = run.backward(inputs, results, saved, None, upstream, needs, opt)
        for x, y, need in zip(found, every, needs, strict=True):
            assert torch.equal(x, y) if need else x is None


def test_gradients_of_o_or_of_the_state_alone():
    inputs, opt, run = tokens(T=40, state=True), Options(0.5, output_final_state=True), runner(*FP32)
    results, saved = run.forward(inputs, None, opt)
    upstream = each(torch.randn_like, *results)
    halves = [run.backward(inputs, results, saved, None, x, [True] * 6, opt) for x in
              ((upstream[0], None), (None, upstream[1]))]  # fmt: skip
    every = run.backward(inputs, results, saved, None, upstream, [True] * 6, opt)
    for name, a, b, both in zip(GRADS, *halves, every, strict=True):
        check_close(name, a + b, both.double(), dtype="float32")


@pytest.mark.usefixtures("fresh_choices")
def test_without_a_kernel_gradients_are_a_fallback_that_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    run = CudaRunner({FORWARD.name: binary(FORWARD.name, *FP32)}, 132)
    check(run, tokens(T=5), Options(output_final_state=True))
    assert "delta_rule: served by the torch backend" in caplog.text and "no kernel of the backward pass" in caplog.text
    monkeypatch.setenv("LINATTN_TL_STRICT", "1")
    with pytest.raises(UnsupportedError, match="no kernel of the backward pass"):
        check(run, tokens(T=5), Options(output_final_state=True))


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0)])
def test_nothing_to_walk(B: int, T: int, state: bool):
    inputs = tokens(B=B, T=T, state=state)
    (o, final), _ = runner(*FP32).forward(inputs, None, Options(output_final_state=True))
    assert o.shape == (B, T, 2, V) and final.shape == (B, 2, K, V)
    assert torch.equal(final, torch.zeros_like(final) if inputs[5] is None else inputs[5])
    assert inputs[5] is None or final.data_ptr() != inputs[5].data_ptr() or B == 0
    needs, upstream = [x is not None for x in inputs], (torch.ones_like(o), torch.ones_like(final))
    found = runner(*FP32).backward(inputs, (o, final), (), None, upstream, needs, Options())
    assert all(x is None or x.shape == given.shape for x, given in zip(found, inputs, strict=True))
    assert inputs[5] is None or torch.equal(found[5], upstream[1])


@pytest.mark.parametrize("how", ["strided", "transposed", "negated", "misaligned"])
def test_awkward_memory(how: str):
    inputs, opt, run = tokens(B=2, state=True), Options(0.3, output_final_state=True), runner(*FP32)
    results, saved = run.forward(inputs, None, opt)
    upstream = each(torch.randn_like, *results)
    found = run.backward(inputs, results, saved, None, upstream, [True] * 6, opt)
    others = each(lambda x: awkward(x, how), *inputs)
    same, kept = run.forward(others, None, opt)
    upstream = each(lambda x: awkward(x, how), *upstream)
    for x, y in zip((*results, *found), (*same, *run.backward(others, same, kept, None, upstream, [True] * 6, opt)),
                    strict=True):  # fmt: skip
        assert torch.equal(x, y)


def test_R18_results_do_not_depend_on_the_order_of_threads(monkeypatch: pytest.MonkeyPatch):
    for arch, dtype in (FP32, BF16):
        each_order = {k.name: launcher(k, problem(dtype), arch, every_schedule=True) for k in PASSES}
        inputs, opt = tokens(dtype, T=150, state=True), Options(0.5)
        run = CudaRunner(each_order, 132)
        results, saved = run.forward(inputs, None, opt)
        grads = (torch.ones_like(results[0]), None)
        found = run.backward(inputs, results, saved, None, grads, [True] * 6, opt)
        with monkeypatch.context() as patch:
            cut_short(patch, 64)
            run = CudaRunner(each_order, 132)
            in_chunks, saved = run.forward(inputs, None, opt)
            found += run.backward(inputs, results, saved, None, grads, [True] * 6, opt)
        assert all(x.isfinite().all() for x in (results[0], in_chunks[0], *found))


# ---- decode


def example(gated: bool, rows: int, n: int = 2) -> list[Any]:
    """q, k, v, g or None, beta and a pool; two value heads to a q/k head."""
    torch.manual_seed(0)
    q, k = torch.randn(3, n, 2, K), normalized(torch.randn(3, n, 2, K))
    g = -torch.rand(3, n, 4) if gated else None
    return [q, k, torch.randn(3, n, 4, V), g, torch.rand(3, n, 4), torch.randn(rows, 4, K, V)]


def decoder() -> CudaDecode:
    return CudaDecode({"delta_rule.decode": binary("delta_rule.decode", *FP32)})  # type: ignore[dict-item]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("how", ["", "strided", "transposed", "negated", "misaligned"])
@pytest.mark.parametrize("slots", [None, [4, -1, 0]])
def test_decode(how: str, slots: Any, gated: bool):
    given, opt = example(gated, 3 if slots is None else 5), Options(0.3, qk_l2norm=True)
    out = torch.full_like(given[2], float("nan"))
    if how:
        *given, out = each(lambda x: awkward(x, how), *given, out)
    q, k, v, g, beta, state = given
    picked, want = None if slots is None else torch.tensor(slots), torch.zeros(v.shape, dtype=torch.float64)
    wq, wk, wv, wg, wbeta, exact = each(torch.Tensor.double, *given)
    decode(wq, wk, wv, wg, wbeta, exact, picked, opt, want)
    assert decoder()(q, k, v, g, beta, state, picked, opt, out) is out
    check_close("o", out, want, dtype="float32")
    check_close("state", state, exact, dtype="float32")


def test_with_gates_and_without_are_not_one_call():
    """The numbers of a launch are kept by what they depend on."""
    q, k, v, g, beta, state = example(True, 3)
    run = decoder()
    for gates in (g, None, g):
        out, want = torch.empty_like(v), torch.zeros(v.shape, dtype=torch.float64)
        wq, wk, wv, wg, wbeta, exact = each(torch.Tensor.double, q, k, v, gates, beta, state)
        decode(wq, wk, wv, wg, wbeta, exact, None, Options(), want)
        check_close("o", run(q, k, v, gates, beta, state.clone(), None, Options(), out), want, dtype="float32")


def test_decode_over_its_own_input():
    q, k, v, g, beta, state = example(True, 3)
    want, other = torch.empty_like(v), state.clone()
    decoder()(q, k, v, g, beta, state, None, Options(), want)
    decoder()(q, k, v, g, beta, other, None, Options(), v)
    assert torch.equal(v, want) and torch.equal(state, other)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_R14_padding_among_the_slots(dtype: torch.dtype):
    """A batch larger than its live rows: padding gives zeros, and no row of the pool but the named ones changes."""
    q, k, v, g, beta, state = example(True, 6, n=1)
    before, out = state.clone(), torch.full_like(v, float("nan"))
    decoder()(q, k, v, g, beta, state, torch.tensor([3, -1, 5], dtype=dtype), Options(), out)
    assert (out[1] == 0).all() and out[[0, 2]].isfinite().all()
    assert torch.equal(state[[0, 1, 2, 4]], before[[0, 1, 2, 4]])
    assert not torch.equal(state[3], before[3]) and not torch.equal(state[5], before[5])


def test_it_is_among_those_that_are_built():
    assert "delta_rule" in trials.families("cuda")
    assert set(KERNELS) <= set(trials.all_kernels("cuda"))


class Kept:
    """A launcher that keeps what it would be made again with."""

    def __init__(self, stage: str):
        self.config, self.kept = binary(f"delta_rule.{stage}", *FP32).config, {}

    def pack(self, numbers: Any) -> Any:
        return numbers

    def call(self, packed: Any, tensors: Sequence[Any]) -> Any:
        return packed, tensors


def test_calls_that_are_made_again():
    q, k, v, g, beta, state = example(True, 3)
    step = CudaDecode({"delta_rule.decode": Kept("decode")})  # type: ignore[dict-item]
    for gates, word, rows in ((g, 3, 3), (None, -1, 0)):
        numbers, tensors = step.call(q, k, v, gates, beta, state, None, Options(), torch.empty_like(v))  # type: ignore[misc]
        assert [x.word for x in tensors] == [0, 1, 2, word, 4, 6, -1, 5]
        assert tensors[5].changed and tensors[7].returned
        assert (numbers["gated"], numbers["G"], numbers["tokens"]) == (int(rows > 0), rows, 2)


@pytest.mark.parametrize("gated", [True, False])
def test_a_pass_that_is_made_again(gated: bool, monkeypatch: pytest.MonkeyPatch):
    inputs, opt = tokens(T=20, state=True, gated=gated), Options(output_final_state=True)
    run = CudaRunner({"delta_rule.forward": Kept("forward")}, 132)
    o, final = torch.empty_like(inputs[2]), torch.empty_like(inputs[5])
    numbers, tensors = run.call(inputs, opt, (o, final))  # type: ignore[misc]
    assert [numbers[name] for name in ("initial", "final", "spans", "norm", "keeps")] == [1, 1, 1, 0, 0]
    assert (numbers["gated"], numbers["G"]) == (int(gated), 20 * gated)
    names = ("q", "k", "v", "g", "beta", "kv0", "o", "kv1")
    words = [trial_cuda.TENSORS["forward"].index(name) for name in names]
    assert [x.word for x in tensors] == [w if gated or w != 3 else -1 for w in words]
    assert run.call([awkward(inputs[0], "strided"), *inputs[1:]], opt, (o, final)) is None
    cut_short(monkeypatch)
    run = CudaRunner({"delta_rule.forward": Kept("forward")}, 132)
    assert run.call(inputs, opt, (o, final)) is None  # more than one launch
