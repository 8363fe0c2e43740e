"""What went wrong for others, part 1: results. One test an id of design/requirements.md, on every op it names.

Tolerances are those of the requirement (relative L2), or the package's own budgets where these are tighter.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from autotune.verify import check_close, relative_rms
from linattn_tl import UnsupportedError, last_backend, linear_attention
from tests.conformance import (
    BACKENDS,
    DTYPES,
    Case,
    check,
    check_grad,
    differentiate,
    expected,
    sequences,
    subjects,
    tensors_of,
    upstream_of,
)

pytestmark = pytest.mark.usefixtures("binaries")
every_op = pytest.mark.parametrize("op", [s.op for s in sequences()])
every_backend = pytest.mark.parametrize("backend", BACKENDS)
two_backends = pytest.mark.parametrize("backend", ["binary", "torch"])  # "jit" serves the same binaries


@two_backends
@pytest.mark.parametrize("causal", [True, False])
def test_R03_normaliser_is_part_of_the_gradient(backend, causal):
    q, k = (torch.randn(1, 20, 2, 8, requires_grad=True) for _ in "qk")
    ones = torch.ones(1, 20, 2, 8, requires_grad=True)
    o, _ = linear_attention(q, k, ones, causal=causal, backend=backend)
    assert (o - 1).abs().max() < 1e-5
    dq, dk = torch.autograd.grad(o, (q, k), torch.randn_like(o))
    assert dq.abs().max() < 1e-5 and dk.abs().max() < 1e-5


def test_R03_gradcheck_in_float64():
    q, k = (torch.randn(1, 6, 2, 3, dtype=torch.float64, requires_grad=True) for _ in "qk")
    v = torch.randn(1, 6, 4, 2, dtype=torch.float64, requires_grad=True)
    for causal in (True, False):
        assert torch.autograd.gradcheck(lambda *x, c=causal: linear_attention(*x, causal=c)[0], (q, k, v))


@every_op
@two_backends
@pytest.mark.parametrize("dtype", DTYPES)
def test_R04_final_state_of_lengths_that_are_no_multiple_of_the_chunk(op, backend, dtype):
    for T in (33, 40, 63, 65, 95, 127):
        case = Case(f"R04-{T}", B=1, T=T, H=2, K=24, V=40, dtype=dtype, final=True)
        tensors = tensors_of(subjects()[op], case)
        outputs = subjects()[op].call(tensors, case, backend)
        exact = expected(op, replace(case, backends=()))[0].outputs
        for name in subjects()[op].states:
            tolerance = 1e-5 if dtype == "float32" else 1e-2
            error = relative_rms(outputs[name].detach(), exact[name])
            assert error <= tolerance, f"T={T}: {name} is wrong by {error:.1e}"


@every_op
@every_backend
def test_R05_packed_sequences_do_not_leak(op, backend):
    cu = (0, 7, 71, 72, 172)
    subject, case = subjects()[op], Case("R05", B=1, T=172, HV=4, V=24, cu=cu, state=True, final=True)
    tensors = tensors_of(subject, case)
    outputs = subject.call(tensors, case, backend)
    grads = differentiate(subject, case, outputs, tensors)
    for i, (a, b) in enumerate(itertools.pairwise(cu)):
        own = {n: (slice(None), slice(a, b)) if n in subject.tokens else slice(i, i + 1) for n in tensors}
        one = {n: x.detach()[own[n]].requires_grad_() for n, x in tensors.items()}
        alone = subject.call(one, replace(case, T=b - a, cu=None), backend)
        for name, x in alone.items():
            mine = own.get(name, (slice(None), slice(a, b)))
            check_close(name, outputs[name].detach()[mine], x.detach().double(), dtype="float32")
        upstream = [upstream_of(case, n, x, subject)[own.get(n, own[subject.tokens[0]])] for n, x in outputs.items()]
        found = torch.autograd.grad(list(alone.values()), list(one.values()), upstream)
        for name, want in zip(one, found, strict=True):
            check_close(f"d{name}", grads[name][own[name]], want.double(), dtype="float32")


@every_op
@every_backend
def test_R05_another_sequence_changes_no_bit(op, backend):
    cu = (0, 7, 71, 72, 172)
    subject, case = subjects()[op], Case("R05", B=1, T=172, HV=4, V=24, cu=cu, state=True, final=True)
    results = []
    for change in (0.0, 1.0):
        tensors = {
            n: (x.detach() + change * torch.nn.functional.pad(torch.ones(64), (7, 101)).view(172, *[1] * (x.ndim - 2)))
            if n in subject.tokens
            else x.detach()
            for n, x in tensors_of(subject, case).items()
        }
        tensors = {n: x.requires_grad_() for n, x in tensors.items()}
        outputs = subject.call(tensors, case, backend)
        grads = differentiate(subject, case, outputs, tensors)
        results.append({**outputs, **{f"d{n}": g for n, g in grads.items()}})
    for name, x in results[0].items():
        y = results[1][name]
        # sequence 1 is tokens 7 to 71; a state has one row a sequence
        others = [0, 2, 3] if x.shape[0] == 4 else (slice(None), [*range(7), *range(71, 172)])
        mine = 1 if x.shape[0] == 4 else (slice(None), slice(7, 71))
        assert torch.equal(x[others], y[others]), f"{name} of another sequence changed"
        assert not torch.equal(x[mine], y[mine]), f"{name} of the changed sequence did not change"


@every_op
@two_backends
@pytest.mark.parametrize("final", [False, True])
def test_R06_upstream_gradients_that_are_not_contiguous(op, backend, final):
    subject, case = subjects()[op], Case("R06", T=40, HV=4, V=24, state=True, final=final)
    weight = torch.randn(2, 40, 4, 24)
    losses = {
        "sum": lambda o: o.sum(),
        "every second token": lambda o: (o * weight)[:, ::2].sum(),
        "heads first": lambda o: (o.transpose(1, 2).contiguous() * weight.transpose(1, 2)).sum(),
        "channels before tokens": lambda o: (o.transpose(1, 3).contiguous() * weight.transpose(1, 3)).sum(),
    }
    for name, loss in losses.items():
        tensors = tensors_of(subject, case)
        outputs = subject.call(tensors, case, backend)
        of_state = sum(outputs[n].sum() for n in subject.states) if final else 0.0
        found = torch.autograd.grad(loss(outputs["o"]) + of_state, list(tensors.values()))

        again = subject.call(tensors, case, backend)
        seen = again["o"].detach().requires_grad_()
        upstream = [torch.autograd.grad(loss(seen), seen)[0].contiguous()]
        upstream += [torch.ones(again[n].shape) for n in subject.states if final]
        contiguous = torch.autograd.grad(list(again.values()), list(tensors.values()), upstream)
        for x, got, want in zip(tensors, found, contiguous, strict=True):
            check_close(f"{name}: d{x}", got, want.double(), dtype="float32")


@two_backends
def test_R07_offsets_beyond_32_bits(backend):
    """v and the upstream gradient have a batch stride above 2^31 elements: 4.3 GB each, most of it never touched."""
    stride = 2**31 + 64
    buffers = [torch.empty(stride + 64 * 2 * 64, dtype=torch.bfloat16) for _ in range(2)]
    v, upstream = (b.as_strided((2, 64, 2, 64), (stride, 2 * 64, 64, 1)) for b in buffers)
    for x in (v, upstream):
        x.copy_(torch.randn(2, 64, 2, 64))
    q, k = (torch.randn(2, 64, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in "qk")

    def run(v, upstream):
        v = v.detach().requires_grad_()
        o, _ = linear_attention(q, k, v, backend=backend)
        return o, *torch.autograd.grad(o, (q, k, v), upstream)

    for far, near in zip(run(v, upstream), run(v.contiguous(), upstream.contiguous()), strict=True):
        check_close("far", far, near.double())


@every_op
@two_backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_R08_autocast(op, backend, dtype):
    subject, case = subjects()[op], Case("R08", T=40, HV=4, V=24, state=True, final=True)
    tensors = tensors_of(subject, case)
    with torch.autocast("cpu", dtype):
        outputs = subject.call(tensors, case, backend)
    assert outputs["o"].dtype == dtype
    exact = expected(op, replace(case, backends=()))[0]
    for name, x in outputs.items():
        assert relative_rms(x.detach(), exact.outputs[name]) <= 2e-2, name
    for name, grad in differentiate(subject, case, outputs, tensors).items():
        assert grad.dtype == torch.float32, f"d{name} has dtype {grad.dtype}"
        assert relative_rms(grad, exact.grads[name]) <= 2e-2, f"d{name}"


@two_backends
def test_R08_mixed_dtypes_are_promoted(backend):
    q = torch.randn(1, 40, 2, 16, requires_grad=True)
    k, v = (torch.randn(1, 40, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
    o, _ = linear_attention(q, k, v, backend=backend)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want, _ = linear_attention(*exact, backend="torch")
    upstream = torch.randn(o.shape).to(o.dtype)
    assert o.dtype == v.dtype
    check_close("o", o.detach(), want.detach())
    found = torch.autograd.grad(o, (q, k, v), upstream)
    for x, got, grad in zip((q, k, v), found, torch.autograd.grad(want, exact, upstream.double()), strict=True):
        assert got.dtype == x.dtype
        check_close("grad", got, grad, dtype="bfloat16")


DIMS = (16, 32, 48, 64, 80, 96, 100, 112, 128, 160, 192, 224, 256)


@every_op
@pytest.mark.parametrize("K", DIMS)
def test_R09_every_pair_of_head_dims(op, K):
    for V in DIMS:
        check(subjects()[op], Case(f"R09-{K}-{V}", B=1, T=34, H=1, HV=1, K=K, V=V, state=True, final=True), "binary")


@pytest.mark.parametrize("op", [s.op for s in subjects().values() if not s.differentiable])
@pytest.mark.parametrize("K", DIMS)
def test_R09_every_pair_of_head_dims_decode(op, K):
    for V in DIMS:
        check(subjects()[op], Case(f"R09-{K}-{V}", B=1, T=2, H=1, HV=1, K=K, V=V), "binary")


@pytest.mark.usefixtures("fresh_choices")
@pytest.mark.parametrize(("K", "V"), [(257, 16), (16, 257), (320, 512)])
@pytest.mark.parametrize("op", list(subjects()))
def test_R09_larger_head_dims_are_refused_or_served_by_torch(op, K, V, caplog):
    subject, case = subjects()[op], Case("R09", B=1, T=5, H=1, HV=1, K=K, V=V)
    tensors = tensors_of(subject, case)
    with pytest.raises(UnsupportedError, match="256"):
        subject.call(tensors, case, "binary")
    got = subject.call(tensors, case, "auto")
    assert last_backend(op) == "torch"
    assert "256" in caplog.text, "the reason for the fallback is not in the log"
    for name, x in got.items():
        check_close(name, x.detach(), expected(op, case)[0].outputs[name])


@every_op
@two_backends
@pytest.mark.parametrize("state", [False, True], ids=["no-state", "state"])
@pytest.mark.parametrize("final", [False, True], ids=["no-final", "final"])
def test_R16_every_subset_of_gradients(op, backend, state, final):
    subject, case = subjects()[op], Case("R16", T=17, HV=4, V=24, state=state, final=final)
    exact, plain = expected(op, replace(case, backends=()))
    names = list(tensors_of(subject, case))
    for count in range(len(names) + 1):
        for wanted in itertools.combinations(names, count):
            tensors = {n: x.detach().requires_grad_(n in wanted) for n, x in tensors_of(subject, case).items()}
            outputs = subject.call(tensors, case, backend)
            assert outputs["o"].requires_grad == bool(wanted)
            if not wanted:
                continue
            pairs = [(x, upstream_of(case, n, x, subject)) for n, x in outputs.items() if x.requires_grad]
            torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])
            for n, x in tensors.items():
                if n in wanted:
                    check_grad(n, x.grad, x, exact.grads[n], plain.grads[n], case.dtype)
                else:
                    assert x.grad is None, f"{n} wants no gradient and got one"


@every_op
@two_backends
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 1e-2), ("float16", 1e-2)])
def test_R17_whole_is_segments_is_decode(op, backend, dtype, tolerance):
    subject, case = subjects()[op], Case("R17", T=200, HV=4, V=24, dtype=dtype, state=True, final=True)
    if subject.step is None:
        pytest.skip(f"{op} has no decode")
    tensors = {n: x.detach() for n, x in tensors_of(subject, case).items()}
    whole = subject.call(tensors, case, backend)

    def in_pieces(lengths):
        state, outputs, start = {n: tensors[n] for n in subject.states}, [], 0
        for n in lengths:
            piece = {x: tensors[x][:, start : start + n] for x in subject.tokens}
            got = subject.call({**piece, **state}, replace(case, T=n), backend)
            state, start = {x: got[x] for x in subject.states}, start + n
            outputs.append(got["o"])
        return {"o": torch.cat(outputs, 1), **state}

    def token_by_token():
        state = {n: tensors[n].clone() for n in subject.states}
        tokens = ({x: tensors[x][:, t] for x in subject.tokens} for t in range(case.T))
        return {"o": torch.stack([subject.step(token, state, case, backend) for token in tokens], 1), **state}

    exact = expected(op, replace(case, backends=()))[0].outputs
    for way, got in {"whole": whole, "segments": in_pieces((1, 3, 64, 65, 67)), "decode": token_by_token()}.items():
        for name, x in got.items():
            error = relative_rms(x, exact[name])
            assert error <= tolerance, f"{way}: {name} is wrong by {error:.1e}"
            error = relative_rms(x, whole[name].double())
            assert error <= tolerance, f"{way}: {name} differs from the whole by {error:.1e}"


@every_op
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_R18_twenty_repeats_give_the_same_bits(op, dtype):
    subject, case = subjects()[op], Case("R18", B=1, T=1024, H=8, HV=8, K=128, V=128, dtype=dtype, final=True)
    tensors, first = tensors_of(subject, case), None
    for i in range(20):
        outputs = subject.call(tensors, case, "binary")
        grads = differentiate(subject, case, outputs, tensors)
        found = {**outputs, **{f"d{n}": g for n, g in grads.items()}}
        first = first or found
        for name, x in found.items():
            assert torch.equal(x, first[name]), f"{name} of call {i} differs from that of call 0"
