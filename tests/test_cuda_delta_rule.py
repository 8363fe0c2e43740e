"""A step of the delta rule on CUDA: its kernel and its runner under the emulator, against the definition."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from autotune.verify import VerificationError, check_close
from linattn_tl import trials
from linattn_tl.ops.delta_rule import trial_cuda
from linattn_tl.ops.delta_rule.cuda import CudaDecode
from linattn_tl.ops.delta_rule.definition import Options, decode, normalized
from linattn_tl.plain import each
from tests.emulated import FP32, K, V, awkward, binary, launcher
from tl_kernels.delta_rule.cuda_decode import DECODE
from tl_kernels.spec import Problem

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
def test_conformance(arch: str, dtype: str, k: int, v: int):
    p = problem(dtype, k, v)
    trial_cuda.check(DECODE, p, launcher(DECODE, p, arch))


class Wrong:
    """The right kernel, and a change to what it leaves."""

    def __init__(self, name: str, by: float):
        self.right, self.name, self.by = binary("delta_rule.decode", *FP32), name, by
        self.config, self.kept = self.right.config, {}
        self.names = ("q", "k", "v", "g", "beta", "o", "kv", "slots")

    def pack(self, numbers: Any) -> Any:
        return self.right.pack(numbers)

    def launch(self, packed: Any, tensors: Sequence[Any]) -> None:
        self.right.launch(packed, tensors)
        dict(zip(self.names, tensors, strict=True))[self.name].mul_(self.by)


@pytest.mark.parametrize("name", ["o", "kv"])
def test_a_wrong_kernel_does_not_pass(name: str):
    with pytest.raises(VerificationError, match=f"{name} has relative RMS error"):
        trial_cuda.check(DECODE, problem("float32"), Wrong(name, 1.001))  # type: ignore[arg-type]


def test_workload():
    run = binary("delta_rule.decode", *FP32)
    before = run.launches
    work = trial_cuda.workload(DECODE, problem("float32"), run, batch=1, heads=1)  # type: ignore[arg-type]
    work.call()
    assert run.launches == before + 1 and work.bytes > 2 * 4 * K * V


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
    run, found = decoder(), []
    for gates in (g, None, g):
        found.append(run(q, k, v, gates, beta, state.clone(), None, Options(), torch.empty_like(v)))
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


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
    assert DECODE in trials.all_kernels("cuda")


class Kept:
    """A launcher that keeps what it would be made again with."""

    def __init__(self) -> None:
        self.config, self.kept = binary("delta_rule.decode", *FP32).config, {}

    def pack(self, numbers: Any) -> Any:
        return numbers

    def call(self, packed: Any, tensors: Sequence[Any]) -> Any:
        return packed, tensors


def test_calls_that_are_made_again():
    q, k, v, g, beta, state = example(True, 3)
    step = CudaDecode({"delta_rule.decode": Kept()})  # type: ignore[dict-item]
    for gates, word, rows in ((g, 3, 3), (None, -1, 0)):
        numbers, tensors = step.call(q, k, v, gates, beta, state, None, Options(), torch.empty_like(v))  # type: ignore[misc]
        assert [x.word for x in tensors] == [0, 1, 2, word, 4, 6, -1, 5]
        assert tensors[5].changed and tensors[7].returned
        assert (numbers["gated"], numbers["G"], numbers["tokens"]) == (int(rows > 0), rows, 2)
