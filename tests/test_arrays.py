"""The cupy backend without a GPU: its chunk forms under NumPy, against the definition; how it is chosen and refused;
and what it asks of CuPy, by a stand-in for CuPy with NumPy underneath."""

import importlib
import itertools
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from autotune.verify import check_close
from linattn_tl import arrays, explain, linear_attention, linear_attention_decode, registry
from linattn_tl.ops.linear_attention import DECODE_OP, OP, trial
from linattn_tl.ops.linear_attention import arrays as forms
from linattn_tl.ops.linear_attention.definition import Options
from tests import conformance, test_bad_input, test_non_finite
from tests.conformance import Case, subjects, tensors_of
from tl_kernels.spec import Problem

pytestmark = pytest.mark.usefixtures("nan_filled")
NAN = float("nan")
LONG = 600  # tokens from which the definition, token by token, takes a second
# "T1000" is in: more than one chunk of everything, and a ragged one
ROWS = [(s.op, c) for s in subjects().values() for c in s.cases if c.T < LONG or c.id == "T1000"]


def numpy_runner(op):
    """What a family's module of array forms has for an op."""
    family = importlib.import_module(f"linattn_tl.ops.{op.removesuffix('_decode')}.arrays")
    return (family.ArrayDecode if op.endswith("_decode") else family.ArrayRunner)(arrays.NUMPY)


@pytest.fixture
def numpy_serves(monkeypatch):
    """Calls that name the cupy backend are computed by the same runners over NumPy."""
    runners = {name: numpy_runner(name) for name in registry.all_ops()}
    usual = registry.choose

    def choose(op, problem, backend="auto"):
        return registry.Choice("cupy", runners[op.name]) if backend == "cupy" else usual(op, problem, backend)

    monkeypatch.setattr(registry, "choose", choose)


# ---- the forms, under NumPy


@pytest.mark.usefixtures("numpy_serves")
@pytest.mark.parametrize(("op", "case"), ROWS, ids=[f"{op}-{c.id}" for op, c in ROWS])
def test_equals_the_definition(op, case):
    conformance.check(subjects()[op], case, "cupy")


@pytest.mark.usefixtures("numpy_serves")
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_long_sequence_goes_in_spans(monkeypatch, chunks, dtype):
    """As many chunks at once as have room for their states, and the last span ragged."""
    case = Case("spans", T=300, HV=4, K=16, V=24, state=True, final=True, dtype=dtype)
    state = case.B * case.H * case.K * (case.V * case.HV // case.H + 1) * 4
    monkeypatch.setattr(forms, "STATE_BYTES", chunks * state)
    spans = []
    usual = forms._chunks
    monkeypatch.setattr(forms, "_chunks", lambda xp, a, *rest: spans.append(a.shape[2]) or usual(xp, a, *rest))
    conformance.check(subjects()[OP.name], case, "cupy")
    assert set(spans) == {64 * chunks, 300 % (64 * chunks)}


OPTIONS = [
    Options(feature_map, causal, normalize, 0.3, 0.1, final)
    for feature_map, causal, normalize, final in itertools.product(
        ("elu1", "relu", "identity"), (True, False), (True, False), (True, False)
    )
    if not (normalize and feature_map == "identity")  # its sum of weights may be anywhere near zero
]


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("opt", OPTIONS, ids=lambda o: "-".join(str(x) for x in (*o[:3], o.output_final_state)))
def test_every_subset_of_gradients(opt, state):
    """Each is that of the definition, whatever else is asked for, and nothing else is returned."""
    problem = Problem(OP.name, "float32", 8, 12)
    case = trial.Case(T=70, H=2, heads=2, options=opt, state=state, lengths=(0, 5, 5, 70))
    inputs, lengths = trial.example(case, problem, seed=3)
    exact = trial.truth(inputs, lengths, opt)
    runner = forms.ArrayRunner(arrays.NUMPY)
    outputs, saved = runner.forward(inputs, lengths, opt)
    given = [x is not None for x in inputs]
    for needs in itertools.product((True, False), repeat=5):
        if any(n and not g for n, g in zip(needs, given, strict=True)):
            continue
        found = runner.backward(inputs, outputs, saved, lengths, exact.upstream, needs, opt)
        assert [x is not None for x in found] == list(needs)
        for name, x, want in zip(("dq", "dk", "dv", "dkv", "dz"), found, exact.grads, strict=True):
            if x is not None:
                check_close(name, x, torch.zeros(x.shape).double() if want is None else want)


@pytest.mark.parametrize("causal", [True, False])
def test_saves_no_more_than_backward_reads(causal):
    (q, k, v, _, _), _ = trial.example(trial.Case(), Problem(OP.name, "bfloat16", 8, 12))
    runner = forms.ArrayRunner(arrays.NUMPY)
    for final in (True, False):
        opt = Options(causal=causal, output_final_state=final)
        (_, kv, z), (den, total_kv, total_z) = runner.forward((q, k, v, None, None), None, opt)
        assert (kv is not None, z is not None) == (final, final)
        assert (total_kv is not None, total_z is not None) == (not causal and not final,) * 2
        assert den.dtype == torch.float32 and den.is_contiguous()
        assert runner.forward((q, k, v, None, None), None, opt, keep=False)[1] == (None, None, None)


def test_sums_are_fp32_whatever_the_inputs_are():
    """A bf16 sum of ones stops at 256."""
    zero = torch.zeros(1, 3000, 1, 1, dtype=torch.bfloat16)
    ones = torch.ones_like(zero)
    inputs = (zero, zero, ones, None, None)
    (o, kv, z), (den, _, _) = forms.ArrayRunner(arrays.NUMPY).forward(inputs, None, Options(output_final_state=True))
    assert kv.item() == z.item() == 3000 and kv.dtype == z.dtype == torch.float32
    assert torch.equal(den.flatten(), torch.arange(1, 3001) + torch.tensor(1e-6))
    assert torch.equal(o, ones)


@pytest.mark.usefixtures("numpy_serves")
def test_decode_continues_a_sequence():
    """Tokens one by one, then a few at once, from the state of a prefix: the whole sequence's outputs and state."""
    subject, case = subjects()[OP.name], Case("whole", T=90, HV=4, V=24, state=True, final=True)
    tensors = {n: x.detach() for n, x in tensors_of(subject, case).items()}
    whole = subject.call(tensors, case, "cupy")
    prefix = {n: x[:, :70] if n in subject.tokens else x for n, x in tensors.items()}
    state = subject.call(prefix, replace(case, T=70), "cupy")
    outputs = [state.pop("o")]
    pool = (state["kv"], state["z"])
    for t in range(70, 80):
        token = (tensors[n][:, t] for n in "qkv")
        outputs.append(linear_attention_decode(*token, pool, backend="cupy").unsqueeze(1))
    outputs.append(linear_attention_decode(*(tensors[n][:, 80:] for n in "qkv"), pool, backend="cupy"))
    for name, x in {"o": torch.cat(outputs, 1), "kv": pool[0], "z": pool[1]}.items():
        check_close(name, x, whole[name].double())


@pytest.mark.usefixtures("numpy_serves")
@pytest.mark.parametrize("op", list(subjects()))
def test_repeats_bit_for_bit(op):
    subject, case = subjects()[op], Case("again", T=130, HV=4, V=24, state=True, final=True)
    runs = []
    for _ in range(3):
        tensors = tensors_of(subject, case)
        outputs = subject.call(tensors, case, "cupy")
        grads = conformance.differentiate(subject, case, outputs, tensors) if subject.differentiable else {}
        runs.append([*outputs.values(), *grads.values()])
    for other in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], other, strict=True))


@pytest.mark.usefixtures("numpy_serves")
@pytest.mark.parametrize("causal", [True, False])
def test_nan_and_infinity_go_where_they_belong(causal):
    for name, bad in itertools.product(("q", "k", "v", "kv", "z"), (NAN, float("inf"))):
        test_non_finite.test_reaches_what_depends_on_it_and_nothing_else(name, bad, causal, "cupy")
    for name in ("q", "k", "v", "kv", "z", "upstream"):
        test_non_finite.test_gradients_of_other_sequences_and_heads_stay_as_they_are(name, causal, "cupy")


@pytest.mark.usefixtures("numpy_serves")
def test_masked_keys_and_padded_rows():
    for dtype in conformance.DTYPES:
        test_non_finite.test_minus_infinity_in_a_key_is_a_weight_of_zero(dtype, "cupy")
    test_non_finite.test_decode_keeps_it_in_its_row("cupy")


@pytest.mark.usefixtures("numpy_serves")
@pytest.mark.parametrize("n", [None, 1, 7])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_may_be_an_input(name, n):
    test_bad_input.test_an_out_that_is_an_input_is_right_or_refused("cupy", name, n)


@pytest.mark.usefixtures("numpy_serves")
@pytest.mark.parametrize("causal", [True, False])
def test_as_a_library_op(causal):
    """The way of torch.compile: no result is an input, every one is contiguous, and gradients come through."""
    inputs = [x.requires_grad_() for x in trial.example(trial.Case(T=70), Problem(OP.name, "float32", 8, 12))[0][:3]]
    opt = Options(causal=causal)
    results = torch.ops.linattn_tl.linear_attention(*inputs, None, None, None, *opt, "cupy")
    upstream = torch.randn(results[0].shape)
    found = torch.autograd.grad(results[0], inputs, upstream)
    o, _ = linear_attention(*inputs, causal=causal, backend="torch")
    for name, x, want in zip("qkv", found, torch.autograd.grad(o, inputs, upstream), strict=True):
        check_close(f"d{name}", x, want.double())
    assert all(x.is_contiguous() for x in results)
    assert len({x.untyped_storage().data_ptr() for x in (*inputs, *results) if x.numel()}) == 5 + 2 * (not causal)


# ---- how it is chosen, by a stand-in for CuPy


class StandIn(ModuleType):
    """CuPy with NumPy underneath, which remembers what it was asked and under which contexts."""

    def __init__(self, available=True, protocol=True):
        super().__init__("cupy")
        self.active, self.entered, self.outside, self.asked = [], [], [], 0
        stream = {"from_external": lambda stream: self._context("stream", stream)} if protocol else {}
        self.cuda = SimpleNamespace(
            is_available=lambda: self._ask(available),
            Device=lambda index: self._context("device", index),
            Stream=SimpleNamespace(**stream),
            ExternalStream=lambda pointer, index: self._context("stream", (pointer, index)),
            using_allocator=lambda malloc: self._context("allocator", malloc),
            PythonFunctionAllocator=lambda malloc, free: SimpleNamespace(malloc=(malloc, free)),
        )

    def _ask(self, available):
        self.asked += 1
        return available

    @contextmanager
    def _context(self, kind, value):
        self.active.append(kind)
        self.entered.append((kind, value))
        try:
            yield
        finally:
            assert self.active.pop() == kind

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if self.active != ["device", "stream", "allocator"]:
            self.outside.append(name)
        return getattr(np, name)

    def RawKernel(self, source, name, options):
        assert name in source
        return SimpleNamespace(compile=lambda: None)


@pytest.fixture
def install(monkeypatch, fresh_choices):
    """install(module): what `import cupy` gives; None for nothing."""

    def forget():
        arrays.missing.cache_clear()
        arrays._check_products.cache_clear()
        arrays._allocator.cache_clear()
        registry.forget_choices()

    def put(module):
        monkeypatch.setitem(sys.modules, "cupy", module)
        forget()
        return module

    yield put
    forget()


def on_gpu(op=OP, dtype="float32"):
    return Problem(op.name, dtype, 64, 64, "cuda")


def reason(problem=None, op=OP):
    return dict(registry.explain_problem(op, problem or on_gpu(op)).rows)["cupy"]


@pytest.mark.parametrize("op", [OP, DECODE_OP], ids=lambda op: op.name)
def test_serves_cuda_tensors_that_no_binary_fits(install, op, caplog):
    install(StandIn())
    said = registry.explain_problem(op, on_gpu(op))
    assert [name for name, _ in said.rows] == ["binary", "jit", "cupy", "torch"]
    assert said.backend == "cupy" and dict(said.rows)["torch"] == "could, after cupy"
    before = registry.stats()["fallback"]
    choice = registry.choose(op, on_gpu(op))
    assert choice.backend == "cupy" and choice.runner.arrays is arrays.CUPY
    assert registry.stats()["fallback"] == before + 1
    assert "served by the cupy backend" in caplog.text and "binary: " in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_serves_every_dtype(install, dtype):
    install(StandIn())
    assert reason(on_gpu(dtype=dtype)) == "serves this call"


@pytest.mark.parametrize(
    ("module", "words"), [(None, "cupy is not installed"), (StandIn(available=False), "cupy sees no device")]
)
def test_says_why_it_cannot(install, module, words):
    install(module)
    assert reason() == f"cannot: {words}"
    assert registry.choose(OP, on_gpu()).backend == "torch"
    with pytest.raises(registry.UnsupportedError, match=f"cupy: {words}"):
        registry.choose(OP, on_gpu(), "cupy")


def test_a_broken_installation_is_a_reason_and_no_crash(install, monkeypatch):
    install(None)

    def broken(name):
        raise OSError("libcudart.so.13: cannot open shared object file\nmore")

    monkeypatch.setattr(importlib, "import_module", broken)
    words = "cupy does not import: OSError: libcudart.so.13: cannot open shared object file"
    assert arrays.refuse(on_gpu()) == words


def test_a_cupy_that_cannot_compute_falls_back(install, caplog):
    """A device is seen without NVRTC, and the first kernel fails."""
    module = install(StandIn())

    def fails(x):
        raise RuntimeError("CuPy failed to load libnvrtc.so.13")

    module.exp = fails
    before = registry.stats()["fallback"]
    assert registry.choose(OP, on_gpu()).backend == "torch"
    assert registry.stats()["fallback"] == before + 1 and len(caplog.records) == 1
    assert "cupy: cupy cannot compute: RuntimeError: CuPy failed to load libnvrtc.so.13" in caplog.text
    with pytest.raises(registry.UnsupportedError, match="cannot compute"):
        registry.choose(OP, on_gpu(), "cupy")


def test_is_asked_once(install):
    module = install(StandIn())
    for dtype in ("float32", "bfloat16", "float32"):
        registry.choose(OP, on_gpu(dtype=dtype))
        registry.choose(DECODE_OP, on_gpu(DECODE_OP, dtype))
        reason()
    assert module.asked == 1


def test_strict_refuses_it_as_it_does_any_fallback(install, monkeypatch):
    install(StandIn())
    monkeypatch.setenv("LINATTN_TL_STRICT", "1")
    with pytest.raises(registry.UnsupportedError, match="only cupy can serve"):
        registry.choose(OP, on_gpu())
    assert registry.choose(OP, on_gpu(), "cupy").backend == "cupy"


def test_never_serves_other_tensors_and_is_not_asked(install):
    module = install(StandIn())
    q = torch.randn(1, 9, 1, 300)  # a head dim that no binary has
    words = "cupy serves CUDA tensors; these are on cpu"
    assert f"cupy    cannot: {words}" in str(explain(linear_attention, q, q, q))
    with pytest.raises(registry.UnsupportedError, match=words):
        linear_attention(q, q, q, backend="cupy")
    state = (torch.zeros(1, 1, 300, 300), torch.zeros(1, 1, 300))
    with pytest.raises(registry.UnsupportedError, match=words):
        linear_attention_decode(*(q[:, 0],) * 3, state, backend="cupy")
    linear_attention(q, q, q)
    assert registry.last_backend(OP.name) == "torch"
    assert (module.asked, module.outside) == (0, [])
    assert arrays.refuse(Problem(OP.name, "float32", 8, 8, "meta")) == "cupy serves CUDA tensors; these are on meta"


# ---- what it asks of CuPy


class Stream:
    """torch's, of a torch that has CUDA."""

    cuda_stream = 1234

    def __cuda_stream__(self):
        return 0, self.cuda_stream


class OldStream:
    cuda_stream = 1234


@pytest.mark.parametrize(("stream", "protocol"), [(Stream(), True), (Stream(), False), (OldStream(), True)])
def test_computes_on_torchs_stream_and_device_in_torchs_memory(install, monkeypatch, stream, protocol):
    module = install(StandIn(protocol=protocol))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    inputs, lengths = trial.example(trial.CASES[2], Problem(OP.name, "float32", 8, 12))
    runner, opt = forms.ArrayRunner(arrays.CUPY), trial.CASES[2].options
    outputs, saved = runner.forward(inputs, lengths, opt)
    exact = trial.truth(inputs, lengths, opt)
    found = runner.backward(inputs, outputs, saved, lengths, exact.upstream, (True,) * 5, opt)
    for x, want in zip((*outputs, *found), (*exact.outputs, *exact.grads), strict=True):
        check_close("x", x, want)
    assert module.outside == [], "CuPy computed outside of torch's stream"
    assert module.active == []
    (_, device), (_, entered), (_, (malloc, free)) = module.entered[:3]
    assert device is inputs[0].device.index
    assert entered is stream if isinstance(stream, Stream) and protocol else entered == (1234, device)
    freed = []
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", freed.append)
    free(77, 0)
    assert malloc is torch.cuda.caching_allocator_alloc and freed == [77]
    assert len(module.entered) == 6, "once for forward and once for backward"


def test_leaves_its_contexts_when_a_call_fails(install, monkeypatch):
    module = install(StandIn())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(forms, "forward", lambda *args: 1 / 0)
    inputs, _ = trial.example(trial.CASES[0], Problem(OP.name, "float32", 8, 12))
    with pytest.raises(ZeroDivisionError):
        forms.ArrayRunner(arrays.CUPY).forward(inputs, None, Options())
    assert len(module.entered) == 3 and module.active == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shares_torchs_memory_where_the_dtype_allows_it(dtype):
    x = torch.randn(4, 5, dtype=dtype, requires_grad=True)
    a = arrays.NUMPY.array(x.t(), dtype)
    assert a.ctypes.data == x.data_ptr() and a.strides == (x.itemsize, 5 * x.itemsize)
    back = arrays.NUMPY.tensor(a, dtype)
    assert torch.equal(back, x.t()) and back.is_contiguous()
    assert back.data_ptr() != x.data_ptr(), "a result is memory of torch's own"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_converts_what_numpy_and_cupy_lack(dtype):
    x = torch.randn(100).to(dtype)
    a = arrays.NUMPY.array(x, torch.float32)
    assert a.dtype == np.float32 and np.array_equal(a, x.float().numpy())
    assert torch.equal(arrays.NUMPY.tensor(a, dtype), x)
    rounded = arrays.NUMPY.tensor(np.float32([1 + 2**-9 + 2**-12, 1 + 2**-9, 1 + 3 * 2**-9]), torch.bfloat16)
    assert rounded.tolist() == [1.0, 1.0, 1 + 2**-7], "to the nearest, and to even from half way"


# ---- on a device


def to_gpu(xs):
    return [None if x is None else x.cuda() for x in xs]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", conformance.DTYPES)
@pytest.mark.parametrize("i", range(len(trial.CASES)))
def test_on_a_device(i, dtype):
    """On a stream of its own, behind work that is still running."""
    pytest.importorskip("cupy")
    case = trial.CASES[i]
    inputs, lengths = trial.example(case, Problem(OP.name, dtype, 40, 72), seed=i)
    exact = trial.truth(inputs, lengths, case.options)
    runner, stream = forms.ArrayRunner(arrays.CUPY), torch.cuda.Stream()
    moved = to_gpu(inputs)
    late = [None if x is None else torch.zeros_like(x) for x in moved]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        for x, y in zip(late, moved, strict=True):
            if x is not None:
                x.copy_(y)
        on_device = None if lengths is None else lengths.cuda()
        outputs, saved = runner.forward(late, on_device, case.options)
        needs = [x is not None for x in inputs]
        found = runner.backward(late, outputs, saved, on_device, to_gpu(exact.upstream), needs, case.options)
    stream.synchronize()
    names = ("o", "kv", "z", "dq", "dk", "dv", "dkv", "dz")
    for name, x, want in zip(names, (*outputs, *found), (*exact.outputs, *exact.grads), strict=True):
        if x is not None and want is not None:
            check_close(name, x.cpu(), want, dtype=dtype)
