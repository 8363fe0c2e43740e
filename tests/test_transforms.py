"""torch.func, forward-mode AD, double backward, torch.compile, autocast: right, or a clear refusal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from autotune.verify import check_close
from linattn_tl import LinearState, linear_attention, linear_attention_decode
from linattn_tl.ops.linear_attention.definition import Options, TorchRunner, recurrent

pytestmark = pytest.mark.usefixtures("binaries")
ROOT = Path(__file__).resolve().parents[1]
B, T, H, HV, K, V = 3, 37, 2, 4, 16, 24


def definition(q, k, v, cu=None, causal=True):
    (o, kv, z), _ = TorchRunner(recurrent).forward(
        (q, k, v, None, None), cu, Options(causal=causal, output_final_state=True)
    )
    return o, kv, z


def output(q, k, v, **keywords):
    return linear_attention(q, k, v, **keywords)[0]


def qkv(*lead, dtype=torch.float32, T=T):
    sizes = ((T, H, K), (T, H, K), (T, HV, V))
    return [torch.randn(*lead, *s, dtype=dtype) for s in sizes]


def doubled(tensors):
    return [x.detach().double() for x in tensors]


# ---- torch.func


@pytest.mark.parametrize("causal", [True, False])
def test_vmap(causal):
    tensors = qkv(5, B)
    got = torch.func.vmap(lambda *x: output(*x, causal=causal))(*tensors)
    for i in range(5):
        check_close("o", got[i], definition(*doubled(x[i] for x in tensors), causal=causal)[0])


def test_vmap_of_packed_sequences_and_states():
    cu, tensors = torch.tensor([0, 5, 5, T]), qkv(5, 1)
    o, kv, z = torch.func.vmap(
        lambda q, k, v: (lambda r: (r[0], *r[1]))(linear_attention(q, k, v, cu_seqlens=cu, output_final_state=True))
    )(*tensors)
    for i in range(5):
        exact = definition(*doubled(x[i] for x in tensors), cu=cu)
        for name, got, want in zip(("o", "kv", "z"), (o, kv, z), exact, strict=True):
            check_close(name, got[i], want)


def test_func_grad_and_vmap_of_grad():
    tensors, weight = qkv(5, 1), torch.randn(1, T, HV, V)

    def loss(form):
        return lambda *x: (form(*x) * weight.to(x[0].dtype)).sum()

    exact = torch.func.vmap(torch.func.grad(loss(lambda *x: definition(*x)[0]), argnums=(0, 1, 2)))(*doubled(tensors))
    found = torch.func.vmap(torch.func.grad(loss(output), argnums=(0, 1, 2)))(*tensors)
    alone = torch.func.grad(loss(output), argnums=(0, 1, 2))(*(x[0] for x in tensors))
    for got, one, want in zip(found, alone, exact, strict=True):
        check_close("vmap of grad", got, want)
        check_close("grad", one, want[0])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, on first use
def test_jvp_and_dual_numbers():
    tensors, tangents = qkv(B), qkv(B)
    exact = torch.func.jvp(lambda *x: definition(*x)[0], tuple(doubled(tensors)), tuple(doubled(tangents)))
    found = torch.func.jvp(output, tuple(tensors), tuple(tangents))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(tensors, tangents, strict=True)]
        dual = forward_ad.unpack_dual(output(*duals))
    for got in (found, dual):
        for name, x, want in zip(("primal", "tangent"), got, exact, strict=True):
            check_close(name, x, want)


def test_functional_call():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(K, 2 * H * K + HV * V))

        def forward(self, x):
            q, k, v = (x @ self.weight).split([H * K, H * K, HV * V], -1)
            return output(q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)))

    layer, x, other = Layer(), torch.randn(B, T, K), torch.randn(K, 2 * H * K + HV * V)
    got = torch.func.functional_call(layer, {"weight": other}, (x,))
    q, k, v = (x.double() @ other.double()).split([H * K, H * K, HV * V], -1)
    want = definition(q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)))[0]
    check_close("o", got.detach(), want)


@pytest.mark.parametrize("backend", ["binary", "jit"])
def test_a_compiled_backend_named_under_a_transform_is_refused(backend):
    with pytest.raises(NotImplementedError, match=f"linear_attention: the {backend} backend .* torch.func"):
        torch.func.vmap(lambda *x: output(*x, backend=backend))(*qkv(5, B))


def decode(q, k, v, state=None):
    state = state or LinearState(torch.zeros(B, HV, K, V), torch.zeros(B, H, K))
    return linear_attention_decode(q[:, 0], k[:, 0], v[:, 0], state)


def dual_decode():
    with forward_ad.dual_level():
        q, k, v = (forward_ad.make_dual(x, x) for x in qkv(B, T=1))
        decode(q, k, v)


def vmap_over_lengths():
    cu = torch.tensor([[0, 5, T], [0, 9, T]])
    torch.func.vmap(lambda q, k, v, c: linear_attention(q, k, v, cu_seqlens=c)[0])(*qkv(2, 1), cu)


REFUSED = {
    "vmap of decode": lambda: torch.func.vmap(decode)(*qkv(5, B, T=1)),
    "grad of decode": lambda: torch.func.grad(lambda *x: decode(*x).sum())(*qkv(B, T=1)),
    "jvp of decode": lambda: torch.func.jvp(decode, tuple(qkv(B, T=1)), tuple(qkv(B, T=1))),
    "dual numbers in decode": dual_decode,
    "vmap over cu_seqlens": vmap_over_lengths,
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_transformed_is_refused_by_name(name):
    op = "linear_attention_decode" if "decode" in name else "linear_attention"
    with pytest.raises((ValueError, TypeError, NotImplementedError, RuntimeError), match=f"{op}: "):
        REFUSED[name]()


FAKE = """
import sys, torch
from linattn_tl import linear_attention, linear_attention_decode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
with FakeTensorMode():
    q, k, v = (torch.randn(1, 40, 2, 16, requires_grad=True) for _ in "qkv")
    state = (torch.zeros(1, 2, 16, 16), torch.zeros(1, 2, 16))
    try:
        if sys.argv[1] == "decode":
            with torch.no_grad():
                o = linear_attention_decode(q[:, 0], k[:, 0], v[:, 0], state)
        else:
            o, _ = linear_attention(q, k, v)
            if sys.argv[1] == "backward":
                o.sum().backward()
                o = q.grad
    except Exception as error:
        assert "linear_attention" in str(error), error
    else:
        assert isinstance(o, FakeTensor) and o.shape[-1] == 16
"""


@pytest.mark.parametrize("what", ["forward", "backward", "decode"])
def test_a_fake_tensor_reaches_no_kernel(what):
    """Its data pointer is null. In a process of its own, since that may be its end."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", FAKE, what], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-500:]}"


# ---- double backward


def test_double_backward_by_finite_differences():
    q, k = (torch.randn(1, 3, 1, 2, dtype=torch.float64, requires_grad=True) for _ in "qk")
    v = torch.randn(1, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(1, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    z = torch.rand(1, 1, 2, dtype=torch.float64).add(1).requires_grad_()

    def run(q, k, v, kv, z):
        o, final = linear_attention(q, k, v, initial_state=(kv, z), output_final_state=True)
        return o, *final

    assert torch.autograd.gradgradcheck(run, (q, k, v, kv, z))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
def test_double_backward_of_a_compiled_kernel(dtype, causal):
    """A gradient penalty: the gradient of |d loss / d (q, k, v)|^2."""
    start = qkv(B, dtype=dtype)
    weight = torch.randn(B, T, HV, V).to(dtype)

    def penalty(tensors, form):
        first = torch.autograd.grad((form(*tensors) * weight.to(tensors[0].dtype)).sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    found = penalty([x.clone().requires_grad_() for x in start], lambda *x: output(*x, causal=causal, backend="binary"))
    exact = [x.requires_grad_() for x in doubled(start)]
    for got, want in zip(found, penalty(exact, lambda *x: definition(*x, causal=causal)[0]), strict=True):
        check_close("second gradient", got, want)


@pytest.mark.parametrize("backend", ["binary", "torch"])
def test_a_graph_of_a_gradient_that_is_zero(backend):
    """The final state does not depend on q, whichever way that is asked."""
    q, k, v = (x.requires_grad_() for x in qkv(B))
    for create_graph in (False, True):
        _, final = linear_attention(q, k, v, output_final_state=True, backend=backend)
        found = torch.autograd.grad(final.kv.sum(), (q, k), create_graph=create_graph, allow_unused=True)
        assert found[0] is None or not found[0].any()
        assert found[1].any()


def test_backward_twice_and_checkpointed():
    q, k, v = (x.requires_grad_() for x in qkv(B))
    o = output(q, k, v, backend="binary")
    first = torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    second = torch.autograd.grad(o.sum(), (q, k, v))
    again = torch.utils.checkpoint.checkpoint(lambda *x: output(*x, backend="binary"), q, k, v, use_reentrant=False)
    third = torch.autograd.grad(again.sum(), (q, k, v))
    for x, y, z in zip(first, second, third, strict=True):
        assert torch.equal(x, y) and torch.equal(x, z)


def test_an_input_changed_before_backward_is_an_error():
    q, k, v = qkv(B)
    weight = torch.ones((), requires_grad=True)
    k = k * weight
    o = output(q, k, v, backend="binary")
    with torch.no_grad():
        k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("backend", ["binary", "torch"])
def test_a_state_that_decode_changed_before_backward_is_an_error(backend):
    q, k, v = (x.requires_grad_() for x in qkv(B))
    state = LinearState(torch.randn(B, HV, K, V), torch.rand(B, H, K))
    o, _ = linear_attention(q, k, v, initial_state=state, backend=backend)
    with torch.no_grad():
        linear_attention_decode(q[:, 0], k[:, 0], v[:, 0], state, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


# ---- torch.compile and autocast of decode


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("slots", [None, torch.tensor([3, -1, 0])], ids=["no-slots", "slots"])
def test_compiled_decode_updates_the_state_in_place(compiler, slots):
    def run(q, k, v, state):
        return linear_attention_decode(2 * q, k, v, state, slots=slots) + 1

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend=compiler)
    rows = B if slots is None else 5
    states = [LinearState(torch.randn(rows, HV, K, V), torch.rand(rows, H, K))]
    states.append(LinearState(*(x.clone() for x in states[0])))
    with torch.no_grad():
        for _ in range(3):
            q, k, v = (x[:, 0] for x in qkv(B, T=1))
            got, want = compiled(q, k, v, states[0]), run(q, k, v, states[1])
            check_close("o", got, want.double())
            for name, x, y in zip(("kv", "z"), *states, strict=True):
                check_close(name, x, y.double())


@pytest.mark.parametrize("backend", ["binary", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_rounds_the_inputs_and_keeps_the_state_wide(backend, dtype):
    """Under autocast a call is the call of the cast tensors; see R08 for its gradients."""
    q, k, v = qkv(B)
    with torch.autocast("cpu", dtype):
        o, final = linear_attention(q, k, v, output_final_state=True, backend=backend)
        token = decode(q, k, v, LinearState(torch.zeros(B, HV, K, V), torch.zeros(B, H, K)))
    assert final.kv.dtype == final.z.dtype == torch.float32
    cast = [x.to(dtype).double() for x in (q, k, v)]
    exact = definition(*cast)
    for name, x, want in zip(("o", "kv", "z"), (o, *final), exact, strict=True):
        check_close(name, x, want)
    check_close("token", token, exact[0][:, 0], dtype=str(dtype).removeprefix("torch."))
