"""The scalar-gated family on CUDA: its kernels and its runner under the emulator, against the definition.

What every kernel computes is tried by the family's own trial, the one that a build runs before it stores a binary. The
trial's truth is compared with the gradients of the definition, and the trial with kernels that are wrong.
"""

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from autotune.target import SHARED_LIMIT, named
from autotune.verify import VerificationError, check_close
from linattn_tl import spans, trials
from linattn_tl.aligned import ready
from linattn_tl.ops.simple_gla import trial_cuda
from linattn_tl.ops.simple_gla.cuda import CudaDecode, CudaRunner
from linattn_tl.ops.simple_gla.definition import Options, TorchRunner, decode, recurrent
from linattn_tl.truths import truth
from tests.emulated import BF16, FP32, K, V, awkward, binary, cut_short, launcher, lowered
from tl_kernels.cuda_sizes import Blocks
from tl_kernels.simple_gla import cuda as kernels
from tl_kernels.spec import Problem

TRUTH = TorchRunner(recurrent)
ALL = (True,) * 5
STAGES = tuple(k.name.split(".")[1] for k in kernels.KERNELS)
PASSES = tuple(s for s in STAGES if s != "decode")
WHOLE = ("backward", "backward_kv")
PIECES = tuple(s for s in PASSES if s not in WHOLE)  # of a problem too large for those
KERNELS = dict(zip(STAGES, kernels.KERNELS, strict=True))

pytestmark = pytest.mark.usefixtures("nan_filled")


def problem(dtype: str, k: int = K, v: int = V) -> Problem:
    return Problem("simple_gla", dtype, k, v, "cuda")


# ---- kernels


@pytest.mark.parametrize(
    ("arch", "dtype", "k", "v"),
    [
        ("sm_80", "float32", K, V),
        ("sm_90a", "bfloat16", K, V),
        ("sm_90a", "bfloat16", 128, 128),
        ("sm_86", "float16", 48, 80),
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_conformance(stage: str, arch: str, dtype: str, k: int, v: int):
    kernel, p = KERNELS[stage], problem(dtype, k, v)
    if not kernel.configs(p, named(arch)):
        assert stage in WHOLE
        return
    trial_cuda.check(kernel, p, launcher(kernel, p, arch))


@pytest.mark.parametrize(
    ("stage", "arch", "dtype", "size", "config"),
    [
        ("forward", "sm_80", "bfloat16", 64, (64, 64, 32, 128, 0)),  # more than one block of V
        ("backward_q", "sm_120a", "bfloat16", 64, (64, 32, 64, 128, 1)),  # and of K, each with a part of c
        ("backward_k", "sm_100a", "float32", 64, (32, 32, 64, 128, 0)),  # and of dg
        ("backward", "sm_80", "bfloat16", 96, (64, 128, 128, 256, 0)),  # nothing but states and gates ahead
        ("backward", "sm_86", "float16", 16, (32, 32, 32, 128, 1)),
    ],
)
def test_other_schedules(stage: str, arch: str, dtype: str, size: int, config: tuple[int, ...]):
    kernel, p = KERNELS[stage], problem(dtype, size, size)
    chosen = type(kernel.configs(p, named(arch))[0])(*config)
    trial_cuda.check(kernel, p, launcher(kernel, p, arch, chosen))


@pytest.mark.parametrize("stage", WHOLE)
def test_what_is_allocated_fits(stage: str):
    """The largest kernels, near the limit of their architecture."""
    kernel, p = KERNELS[stage], problem("bfloat16", 128, 128)
    config = kernel.configs(p, named("sm_90a"))[0]
    source = lowered(kernel, p, config, "sm_90a").source
    found = re.search(r"MaxDynamicSharedMemorySize, (\d+)", source)
    assert found and 0 < int(found[1]) <= SHARED_LIMIT["sm_90a"]


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_kernels_of_the_gradient_of_g_have_chunks_of_one_size(arch: str):
    for dtype, size in product(("float32", "bfloat16"), (16, 64, 96, 128, 256)):
        stages = ("backward_q", "backward", "backward_kv", "backward_k")
        offered = {s: KERNELS[s].configs(problem(dtype, size, size), named(arch)) for s in (*stages, "forward")}
        sizes = {c.C for s in stages for c in offered[s]}
        assert len(sizes) == 1
        # forward, as it is built unless it is tuned, can leave a state for each
        assert not offered["backward"] or max(sizes) % offered["forward"][0].C == 0


# ---- the trial


def test_the_truth_of_a_trial_is_the_definition():
    p = problem("float32", 16, 16)
    for case in trial_cuda.CASES:
        x = trial_cuda.solved(case, p, 32)
        inputs = [y[None].double() for y in (x.q, x.k, x.v, x.g)]
        leaves = [y.requires_grad_() for y in (*inputs, x.start.double())]
        cu = torch.tensor(case.bounds)
        (o, final), _ = TRUTH.forward(leaves, cu, case.options._replace(output_final_state=True))
        grads = torch.autograd.grad([o, final], leaves, [x.dout[None].double(), x.dfinal.double()], allow_unused=True)
        heads = [g[0].unflatten(1, (-1, case.heads)) for g in (x.dq[None], x.dk[None])]
        pairs = [(x.o, o[0]), (x.final, final), (x.dv, grads[2][0]), (x.dg.sum(-1), grads[3][0]), (x.dstart, grads[4])]
        pairs += [(h.sum(2), g[0]) for h, g in zip(heads, grads[:2], strict=True)]
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-10, atol=1e-10)


class Wrong:
    """A launcher whose kernel does one thing wrong."""

    def __init__(self, stage: str, change: Any):
        self.right, self.change = binary(f"simple_gla.{stage}", *FP32), change
        self.config, self.kept = self.right.config, {}
        self.names = trial_cuda.TENSORS[stage]

    def pack(self, numbers: Any) -> Any:
        self.numbers = numbers
        return self.right.pack(numbers)

    def launch(self, packed: Any, tensors: Sequence[Any]) -> None:
        self.right.launch(packed, tensors)
        self.change({n: x for n, x in zip(self.names, tensors, strict=True) if x is not None}, self.numbers)


def _beyond(t: dict[str, torch.Tensor], numbers: Any) -> None:
    t["o"][-1] = 0


def _scaled(name: str, by: float) -> Any:
    def change(t: dict[str, torch.Tensor], numbers: Any) -> None:
        if name in t:
            t[name].mul_(by)

    return change


@pytest.mark.parametrize(
    ("stage", "change", "said"),
    [
        ("forward", _beyond, "o changed in 1 rows"),
        ("forward", _scaled("kv1", 1.001), "kv1 has relative RMS error"),
        ("forward", _scaled("states", 1.001), "states has relative RMS error"),
        ("carry", _scaled("decay", 0.99), "decay has relative RMS error"),
        ("backward_q", _scaled("crossing", -1.0), "crossing has relative RMS error"),
        ("backward_q", _scaled("states", 1.001), "states has relative RMS error"),
        ("backward", _scaled("dq", 1.001), "dq has relative RMS error"),
        ("backward", _scaled("dg", 1.001), "dg has relative RMS error"),
        ("backward", _scaled("states", 0.0), "states changed in"),
        ("backward_kv", _scaled("dg", 1.001), "dg has relative RMS error"),
        ("backward_kv", _scaled("k", 0.0), "k changed in"),
    ],
)
def test_a_wrong_kernel_does_not_pass(stage: str, change: Any, said: str):
    with pytest.raises(VerificationError, match=said):
        trial_cuda.check(KERNELS[stage], problem("float32"), Wrong(stage, change))


@pytest.mark.parametrize("stage", STAGES)
def test_workload(stage: str):
    run = binary(f"simple_gla.{stage}", *FP32)
    before = run.launches
    work = trial_cuda.workload(KERNELS[stage], problem("float32"), run, tokens=64, batch=1, heads=1)
    work.call()
    assert run.launches == before + 1 and work.bytes > 0


# ---- the runner


def runner(arch: str, dtype: str, stages: Sequence[str] = PASSES, multiprocessors: int = 1) -> CudaRunner:
    """With one multiprocessor nothing is cut."""
    names = [f"simple_gla.{s}" for s in stages]
    return CudaRunner({name: binary(name, arch, dtype) for name in names}, multiprocessors)


def launches() -> dict[str, int]:
    return {f"{a}.{d}.{s}": binary(f"simple_gla.{s}", a, d).launches for s in STAGES for a, d in (FP32, BF16)}


def example(
    dtype: str = "float32",
    B: int = 1,
    T: int = 37,
    H: int = 1,
    heads: int = 2,
    cu: tuple[int, ...] | None = None,
    state: bool = False,
) -> tuple[list[Any], Any]:
    """(q, k, v, g, state) and lengths."""
    io, N = getattr(torch, dtype), B if cu is None else len(cu) - 1
    q, k = (torch.randn(B, T, H, K).to(io) for _ in "qk")
    v, g = torch.randn(B, T, H * heads, V).to(io), -(torch.rand(B, T, H * heads) ** 3)
    if T > 20:
        g[:, 17], g[:, 11], g[:, 5:9] = -torch.inf, 0.0, -27.6
    start = torch.randn(N, H * heads, K, V) if state else None
    return [q, k, v, g, start], None if cu is None else torch.tensor(cu)


def check(run: CudaRunner, inputs: Sequence[Any], lengths: Any, opt: Options, *subsets: Sequence[bool]) -> None:
    """Forward, and backward for each subset of gradients, are within the caps, in their inputs' dtypes.

    Backward with what forward has kept, and without.
    """
    dtype = str(inputs[0].dtype).removeprefix("torch.")
    exact = truth(TRUTH, inputs, lengths, opt)
    results, saved = run.forward(inputs, lengths, opt)
    for name, x, want in zip(("o", "state"), results, exact.outputs, strict=True):
        assert (x is not None) == (name == "o" or opt.output_final_state)
        if x is not None:
            assert x.dtype == (inputs[2].dtype if name == "o" else torch.float32)
            check_close(name, x, want, dtype=dtype)
    for kept, wants in product((saved, ()) if saved else ((),), subsets or (ALL,)):
        needs = [want and x is not None for want, x in zip(wants, inputs, strict=True)]
        found = run.backward(inputs, results, kept, lengths, exact.upstream, needs, opt)
        for name, x, given, want, need in zip(
            ("dq", "dk", "dv", "dg", "dstate"), found, inputs, exact.grads, needs, strict=True
        ):
            assert (x is not None) == need, (name, needs)
            if x is not None:
                assert x.dtype == given.dtype and x.shape == given.shape, name
                check_close(name, x, torch.zeros_like(x).double() if want is None else want, dtype=dtype)


@pytest.mark.parametrize(("arch", "dtype"), [FP32, BF16])
@pytest.mark.parametrize("T", [1, 37, 100])
def test_pass(arch: str, dtype: str, T: int):
    inputs, lengths = example(dtype, B=2 if T == 37 else 1, T=T, H=1 + (T == 37), state=T != 100)
    check(runner(arch, dtype), inputs, lengths, Options(0.5, output_final_state=T != 37))


@pytest.mark.parametrize(("arch", "dtype"), [FP32, BF16])
def test_packed(arch: str, dtype: str):
    inputs, lengths = example(dtype, T=100, cu=(0, 0, 7, 7, 71, 100, 100), state=True)
    check(runner(arch, dtype), inputs, lengths, Options(0.5, output_final_state=True))


def test_every_subset_of_gradients():
    inputs, lengths = example(T=5, state=True)
    opt = Options(output_final_state=True)
    check(runner(*FP32), inputs, lengths, opt, *product((True, False), repeat=5))
    check(runner(*FP32, PIECES), inputs, lengths, opt, *product((True, False), repeat=5))


def test_only_what_is_wanted_is_launched():
    inputs, lengths = example(T=20, state=True)
    run = runner(*FP32)
    results, saved = run.forward(inputs, lengths, Options())
    for needs, with_states, names in (
        ((True, False, False, False, False), {"backward_q"}, {"backward_q"}),
        ((True, True, True, False, False), {"backward"}, {"backward_q", "backward_kv"}),
        ((True, False, True, False, False), {"backward"}, {"backward_q", "backward_v"}),
        ((False, True, True, False, True), {"backward_kv"}, {"backward_kv"}),
        ((False, False, True, False, False), {"backward_v"}, {"backward_v"}),
        ((False, True, False, False, True), {"backward_k"}, {"backward_k"}),
        ((False, False, False, True, False), {"backward"}, {"backward_q", "backward_k"}),
        ((False, False, False, False, True), {"carry"}, {"carry"}),
    ):
        for kept, expected in ((saved, with_states), ((), names)):
            before = launches()
            run.backward(inputs, results, kept, lengths, (torch.ones_like(results[0]), None), needs, Options())
            assert {n.split(".")[2] for n, count in launches().items() if count > before[n]} == expected


def test_forward_keeps_states_for_the_kernel_that_reads_them():
    inputs, lengths = example(T=70)
    (_, saved), (_, none) = (runner(*FP32).forward(inputs, lengths, Options(), keep) for keep in (True, False))
    assert [x.shape for x in saved] == [(3, 2, K, V)] and none == ()
    assert runner(*FP32, PIECES).forward(inputs, lengths, Options())[1] == ()
    run = runner(*FP32)
    run.binaries["backward"] = Kept("backward")
    run.binaries["backward"].config = Blocks(48, K, V, 128)  # which no chunks of forward fill
    assert run.forward(inputs, lengths, Options())[1] == ()


@pytest.mark.parametrize("cu", [None, (0, 0, 7, 7, 150, 280, 280)])
def test_chunks_of_forward_are_shorter(cu: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch):
    """As a tuned one may have them."""
    cut_short(monkeypatch, spans.SPAN_MULTIPLE)
    inputs, lengths = example("bfloat16", T=280, cu=cu, state=True)
    p = problem("bfloat16")
    run = runner(*BF16, multiprocessors=64)
    run.binaries["forward"] = launcher(KERNELS["forward"], p, BF16[0], Blocks(32, K, V, 128, 1))
    assert run.keeps == 64
    check(run, inputs, lengths, Options(0.5, output_final_state=True))


def test_the_walk_forward_keeps_states_for_the_gradient_of_g_alone():
    """They are most of what a backward pass writes."""
    inputs, lengths = example(T=20)
    run, seen = runner(*FP32), []
    right = run.new_crossing
    run.new_crossing = lambda x: seen.append(x) or right(x)  # type: ignore[method-assign]
    results, _ = run.forward(inputs, lengths, Options())
    grads = (torch.ones_like(results[0]), None)
    run.backward(inputs, results, (), lengths, grads, (True, True, True, False, False), Options())
    assert not seen
    run.backward(inputs, results, (), lengths, grads, (False, False, False, True, False), Options())
    assert len(seen) == 1


@pytest.mark.parametrize(("arch", "dtype"), [FP32, BF16])
@pytest.mark.parametrize("cu", [None, (0, 0, 7, 7, 150, 400, 400)])
def test_spans(arch: str, dtype: str, cu: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch):
    """No span is shorter than a chunk: spans of one sequence would share the place of its state."""
    cut_short(monkeypatch, spans.SPAN_MULTIPLE)
    inputs, lengths = example(dtype, T=400, cu=cu, state=True)
    before = launches()
    check(runner(arch, dtype, multiprocessors=64), inputs, lengths, Options(0.5, output_final_state=True))
    name = f"{arch}.{dtype}.scan"
    assert launches()[name] - before[name] == 1 + 1 + 2  # forward, backward with what it has kept, and without


@pytest.mark.parametrize("needs", [ALL, (False, False, True, False, True), (False, False, False, False, True)])
def test_spans_without_a_kernel_for_both(needs: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch):
    cut_short(monkeypatch, spans.SPAN_MULTIPLE)
    inputs, lengths = example(T=150, state=True)
    check(runner(*FP32, PIECES, 64), inputs, lengths, Options(output_final_state=True), needs)


@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}, {"T": 0, "cu": (0, 0, 0)}, {"T": 0, "cu": (0,)}])
def test_without_tokens_nothing_is_launched(sizes: dict[str, Any]):
    before, opt = launches(), Options(output_final_state=True)
    for state in (True, False):
        inputs, lengths = example(**sizes, state=state)
        check(runner(*FP32, multiprocessors=64), inputs, lengths, opt)
        (_, final), _ = runner(*FP32).forward(inputs, lengths, opt)
        given = inputs[4]
        assert torch.equal(final, torch.zeros_like(final) if given is None else given)
        assert given is None or final.numel() == 0 or final.data_ptr() != given.data_ptr()
    assert launches() == before


@pytest.mark.parametrize("how", ["strided", "transposed", "negated", "misaligned"])
def test_awkward_memory(how: str):
    inputs, _ = example(T=20, cu=(0, 5, 20), state=True)
    lengths = torch.tensor([9, 0, 5, 20], dtype=torch.int32)[1:]  # misaligned
    opt = Options(output_final_state=True)
    given = [awkward(x, how) for x in inputs]
    assert not any(ready(x) for x in given)
    check(runner(*FP32), given, lengths, opt)


def test_inputs_are_left_alone_and_results_repeat():
    inputs, lengths = example(T=20, state=True)
    before, opt, run = [x.clone() for x in inputs], Options(output_final_state=True), runner(*FP32)
    first, saved = run.forward(inputs, lengths, opt)
    second, _ = run.forward(inputs, lengths, opt, keep=False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    grads = [torch.randn(x.shape) for x in first]
    found = [run.backward(inputs, first, saved, lengths, grads, ALL, opt) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


# ---- decode


def decoder() -> CudaDecode:
    return CudaDecode({"simple_gla.decode": binary("simple_gla.decode", *FP32)})


@pytest.mark.parametrize("how", ["", "strided", "transposed", "negated", "misaligned"])
@pytest.mark.parametrize("slots", [None, [4, -1, 0]])
def test_decode(how: str, slots: Any):
    (q, k, v, g, _), _ = example(B=3, T=2)
    (*_, state), _ = example(B=3 if slots is None else 5, T=1, state=True)
    out = torch.full_like(v, float("nan"))
    if how:
        q, k, v, g, state, out = (awkward(x, how) for x in (q, k, v, g, state, out))
    picked, opt = None if slots is None else torch.tensor(slots), Options(0.3)
    want_state, want = state.double(), torch.zeros(v.shape, dtype=torch.float64)
    decode(q.double(), k.double(), v.double(), g.double(), want_state, picked, opt, want)
    assert decoder()(q, k, v, g, state, picked, opt, out) is out
    check_close("o", out, want, dtype="float32")
    check_close("state", state, want_state, dtype="float32")


def test_decode_over_its_own_input():
    (q, k, v, g, _), _ = example(B=3, T=2)
    (*_, state), _ = example(B=3, T=1, state=True)
    want, other = torch.empty_like(v), state.clone()
    decoder()(q, k, v, g, state, None, Options(), want)
    decoder()(q, k, v, g, other, None, Options(), v)
    assert torch.equal(v, want) and torch.equal(state, other)


# ---- what the house finds by itself


def test_the_family_is_among_those_that_are_built():
    assert "simple_gla" in trials.families("cuda")
    needed = {k.name for k in trials.needed_kernels(problem("bfloat16", 128, 128), named("sm_90a"))}
    assert needed == {k.name for k in kernels.KERNELS} - {"simple_gla.backward_k", "simple_gla.backward_v"}
    needed = {k.name for k in trials.needed_kernels(problem("float32", 128, 128), named("sm_90a"))}
    assert needed == {k.name for k in kernels.KERNELS} - {f"simple_gla.{stage}" for stage in WHOLE}


class Kept:
    """A launcher that keeps what it would be made again with."""

    def __init__(self, stage: str):
        self.config, self.kept = binary(f"simple_gla.{stage}", *FP32).config, {}

    def pack(self, numbers: Any) -> Any:
        return numbers

    def call(self, packed: Any, tensors: Sequence[Any]) -> Any:
        return packed, tensors


def test_calls_that_are_made_again():
    """One launch for a pass that is not cut; a step with its state where it lies."""
    inputs, _ = example(T=20, state=True)
    run, opt = CudaRunner({"simple_gla.forward": Kept("forward")}, 1), Options(output_final_state=True)
    o, final = torch.empty_like(inputs[2]), torch.empty_like(inputs[4])
    numbers, tensors = run.call(inputs, opt, (o, final))  # type: ignore[misc]
    assert [numbers[name] for name in ("initial", "final", "spans", "chunks", "keeps")] == [1, 1, 1, 0, 0]
    names = ("q", "k", "v", "g", "kv0", "o", "kv1")
    assert [x.word for x in tensors] == [trial_cuda.TENSORS["forward"].index(name) for name in names]
    assert run.call([awkward(inputs[0], "strided"), *inputs[1:]], opt, (o, final)) is None
    q, k, v, g, _ = (x[:, 0] if x.ndim == 4 or x.ndim == 3 else x for x in inputs)
    step = CudaDecode({"simple_gla.decode": Kept("decode")})
    numbers, tensors = step.call(q, k, v, g, inputs[4], None, opt, torch.empty_like(v))  # type: ignore[misc]
    assert [x.word for x in tensors] == [0, 1, 2, 3, 5, 6, 4] and tensors[4].changed and tensors[6].returned
    assert numbers["kv_rows"] == inputs[4].stride(0) and numbers["tokens"] == 1
