"""The delta rule on CUDA: its kernels and its runners under the emulator, against the definition."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from autotune.verify import VerificationError, check_close
from linattn_tl import UnsupportedError, trials
from linattn_tl.ops.delta_rule import trial_cuda
from linattn_tl.ops.delta_rule.cuda import CudaDecode, CudaRunner
from linattn_tl.ops.delta_rule.definition import Options, TorchRunner, decode, normalized, recurrent
from linattn_tl.plain import each
from linattn_tl.truths import truth
from tests.emulated import BF16, FP32, K, V, awkward, binary, launcher
from tl_kernels.cuda_sizes import Blocks
from tl_kernels.delta_rule.cuda import FORWARD
from tl_kernels.delta_rule.cuda_decode import DECODE
from tl_kernels.spec import Kernel, Problem

pytestmark = pytest.mark.usefixtures("nan_filled")


def problem(dtype: str, k: int = K, v: int = V) -> Problem:
    return Problem("delta_rule", dtype, k, v, "cuda")


@pytest.mark.parametrize(
    ("arch", "dtype", "k", "v"),
    [
        ("sm_80", "float32", K, V),
        ("sm_90a", "bfloat16", K, V),
        ("sm_90a", "bfloat16", 128, 128),
        ("sm_86", "float16", 48, 80),
    ],
)
@pytest.mark.parametrize("kernel", [FORWARD, DECODE], ids=lambda kernel: kernel.name)
def test_conformance(kernel: Kernel, arch: str, dtype: str, k: int, v: int):
    p = problem(dtype, k, v)
    trial_cuda.check(kernel, p, launcher(kernel, p, arch))


@pytest.mark.parametrize(
    ("arch", "dtype", "size", "config"),
    [
        ("sm_80", "bfloat16", 64, (64, 64, 32, 128, 0)),  # more than one block of V, nothing ahead
        ("sm_120a", "bfloat16", 192, (32, 256, 64, 256, 0)),  # a K that is padded
    ],
)
def test_other_schedules(arch: str, dtype: str, size: int, config: tuple[int, ...]):
    p = problem(dtype, size, size)
    trial_cuda.check(FORWARD, p, launcher(FORWARD, p, arch, Blocks(*config)))


class Wrong:
    """The right kernel, and a change to what it leaves."""

    def __init__(self, stage: str, name: str, by: float):
        self.right, self.name, self.by = binary(f"delta_rule.{stage}", *FP32), name, by
        self.config, self.kept = self.right.config, {}
        step = ("q", "k", "v", "g", "beta", "o", "kv", "slots")
        self.names = step if stage == "decode" else trial_cuda.TENSORS

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
        ("forward", "k", "k changed in"),
    ],
)
def test_a_wrong_kernel_does_not_pass(stage: str, name: str, said: str):
    kernel = DECODE if stage == "decode" else FORWARD
    with pytest.raises(VerificationError, match=said):
        trial_cuda.check(kernel, problem("float32"), Wrong(stage, name, 1.001))  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", [FORWARD, DECODE], ids=lambda kernel: kernel.name)
def test_workload(kernel: Kernel):
    run = binary(kernel.name, *FP32)
    before = run.launches
    work = trial_cuda.workload(kernel, problem("float32"), run, tokens=64, batch=1, heads=1)  # type: ignore[arg-type]
    work.call()
    assert run.launches == before + 1 and work.bytes > 0


# ---- whole sequences


def runner(arch: str, dtype: str) -> CudaRunner:
    return CudaRunner({"delta_rule.forward": binary("delta_rule.forward", arch, dtype)})


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
    """Forward, and the gradients, which are plain torch's."""
    dtype, lengths = str(inputs[0].dtype).removeprefix("torch."), None if cu is None else torch.tensor(cu)
    exact = truth(TorchRunner(recurrent), inputs, lengths, opt)
    results, saved = run.forward(inputs, lengths, opt)
    for name, x, want in zip(("o", "state"), results, exact.outputs, strict=True):
        assert (x is not None) == (name == "o" or opt.output_final_state)
        if x is not None:
            check_close(name, x, want, dtype=dtype)
    needs = [x is not None for x in inputs]
    found = run.backward(inputs, results, saved, lengths, exact.upstream, needs, opt)
    for name, x, want in zip(("dq", "dk", "dv", "dg", "dbeta", "dstate"), found, exact.grads, strict=True):
        if x is not None:
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


@pytest.mark.usefixtures("fresh_choices")
def test_gradients_are_a_fallback_that_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    check(runner(*FP32), tokens(T=5), Options(output_final_state=True))
    assert (
        "delta_rule: served by the torch backend" in caplog.text and "backward pass has no CUDA kernel" in caplog.text
    )
    monkeypatch.setenv("LINATTN_TL_STRICT", "1")
    with pytest.raises(UnsupportedError, match="backward pass has no CUDA kernel"):
        check(runner(*FP32), tokens(T=5), Options(output_final_state=True))


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0)])
def test_nothing_to_walk(B: int, T: int, state: bool):
    inputs = tokens(B=B, T=T, state=state)
    (o, final), _ = runner(*FP32).forward(inputs, None, Options(output_final_state=True))
    assert o.shape == (B, T, 2, V) and final.shape == (B, 2, K, V)
    assert torch.equal(final, torch.zeros_like(final) if inputs[5] is None else inputs[5])
    assert inputs[5] is None or final.data_ptr() != inputs[5].data_ptr() or B == 0


@pytest.mark.parametrize("how", ["strided", "transposed", "negated", "misaligned"])
def test_awkward_memory(how: str):
    inputs, opt = tokens(B=2, state=True), Options(0.3, output_final_state=True)
    (o, final), _ = runner(*FP32).forward(inputs, None, opt)
    (p, last), _ = runner(*FP32).forward(each(lambda x: awkward(x, how), *inputs), None, opt)
    assert torch.equal(o, p) and torch.equal(final, last)


def test_R18_results_do_not_depend_on_the_order_of_threads():
    for arch, dtype in (FP32, BF16):
        run = CudaRunner({"delta_rule.forward": launcher(FORWARD, problem(dtype), arch, every_schedule=True)})
        (o, _), _ = run.forward(tokens(dtype, T=70, state=True), None, Options(0.5))
        assert o.isfinite().all()


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
    assert {FORWARD, DECODE} <= set(trials.all_kernels("cuda"))


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


def test_a_pass_that_is_made_again():
    inputs, opt = tokens(T=20, state=True), Options(output_final_state=True)
    run = CudaRunner({"delta_rule.forward": Kept("forward")})
    o, final = torch.empty_like(inputs[2]), torch.empty_like(inputs[5])
    numbers, tensors = run.call(inputs, opt, (o, final))  # type: ignore[misc]
    assert [numbers[name] for name in ("initial", "final", "spans", "norm")] == [1, 1, 1, 0]
    names = ("q", "k", "v", "g", "beta", "kv0", "o", "kv1")
    assert [x.word for x in tensors] == [trial_cuda.TENSORS.index(name) for name in names]
    assert run.call([*inputs[:3], None, *inputs[4:]], opt, (o, final)) is None
    assert run.call([awkward(inputs[0], "strided"), *inputs[1:]], opt, (o, final)) is None
