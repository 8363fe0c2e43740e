"""NaN and infinity: they reach every output that depends on them, no other sequence or head, and crash nothing."""

import pytest
import torch

from autotune.verify import check_close
from linattn_tl import LinearState, linear_attention, linear_attention_decode
from linattn_tl.ops.linear_attention.definition import Options, TorchRunner, recurrent

pytestmark = pytest.mark.usefixtures("binaries")
B, T, H, K, V = 2, 150, 2, 16, 24
NAN, INF = float("nan"), float("inf")
WHERE = (0, 100, 1, 5)  # sequence, token, head, element: in the second or fourth chunk
two_backends = pytest.mark.parametrize("backend", ["binary", "torch"])


def run(tensors, backend, causal):
    q, k, v, kv, z = tensors
    o, final = linear_attention(q, k, v, initial_state=(kv, z), output_final_state=True, causal=causal, backend=backend)
    return o, *final


def make():
    tokens = [torch.randn(B, T, H, n) for n in (K, K, V)]
    return [*tokens, torch.randn(B, H, K, V), torch.rand(B, H, K) + 1]


@two_backends
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["q", "k", "v", "kv", "z"])
def test_reaches_what_depends_on_it_and_nothing_else(name, bad, causal, backend):
    clean = make()
    tensors = [x.clone() for x in clean]
    i = ("q", "k", "v", "kv", "z").index(name)
    tensors[i][WHERE if i < 3 else (0, 1, 5, 5) if i == 3 else (0, 1, 5)] = bad
    exact, _ = TorchRunner(recurrent).forward(
        [x.double() for x in tensors], None, Options(causal=causal, output_final_state=True)
    )
    got, before = run(tensors, backend, causal), run(clean, backend, causal)
    for label, x, y, want in zip(("o", "kv", "z"), got, before, exact, strict=True):
        assert (~x.isfinite() | want.isfinite()).all(), f"{label} hides a value that is not finite"
        head = (slice(None), slice(None), 0) if label == "o" else (slice(None), 0)
        assert torch.equal(x[1], y[1]), f"{label} of another sequence changed"
        assert torch.equal(x[head], y[head]), f"{label} of another head changed"
    if causal and i < 3:
        assert torch.equal(got[0][:, :64], before[0][:, :64]), "o of an earlier chunk changed"


@two_backends
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["q", "k", "v", "kv", "z", "upstream"])
def test_gradients_of_other_sequences_and_heads_stay_as_they_are(name, causal, backend):
    clean, upstream = make(), torch.randn(B, T, H, V)
    i = ("q", "k", "v", "kv", "z", "upstream").index(name)
    results = []
    for value in (None, NAN):
        tensors = [x.clone() for x in (*clean, upstream)]
        if value is not None:
            tensors[i][WHERE if i in (0, 1, 2, 5) else (0, 1, 5, 5) if i == 3 else (0, 1, 5)] = value
        *inputs, dout = tensors
        inputs = [x.requires_grad_() for x in inputs]
        results.append(torch.autograd.grad(run(inputs, backend, causal)[0], inputs, dout))
    assert any(x.isnan().any() for x in results[1]), "no gradient shows it"
    for label, x, y in zip(("dq", "dk", "dv", "dkv", "dz"), *results, strict=True):
        head = (slice(None), slice(None), 0) if x.shape[1] == T else (slice(None), 0)
        assert torch.equal(x[1], y[1]), f"{label} of another sequence changed"
        assert torch.equal(x[head], y[head]), f"{label} of another head changed"


@two_backends
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_minus_infinity_in_a_key_is_a_weight_of_zero(dtype, backend):
    """elu(-inf) + 1 = 0: a masked key, and nothing about it is undefined."""
    q, k, v = (torch.randn(B, T, H, K).to(getattr(torch, dtype)) for _ in "qkv")
    k[:, 40:90] = -INF
    inputs = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    (want, _, _), _ = TorchRunner(recurrent).forward((*exact, None, None), None, Options())
    o, _ = linear_attention(*inputs, backend=backend)
    check_close("o", o.detach(), want.detach())
    upstream = torch.randn(o.shape).to(o.dtype)
    found = torch.autograd.grad(o, inputs, upstream)
    for name, x, y in zip("qkv", found, torch.autograd.grad(want, exact, upstream.double()), strict=True):
        check_close(f"d{name}", x, y)


@two_backends
def test_decode_keeps_it_in_its_row(backend):
    q, k, v = (torch.randn(4, H, n) for n in (K, K, V))
    state = LinearState(torch.randn(6, H, K, V), torch.rand(6, H, K) + 1)
    q[1], k[1], v[1] = NAN, INF, NAN  # padding
    q[2, 0, 3] = NAN
    state.kv[5], state.z[5] = NAN, NAN  # a free row of the pool
    before = LinearState(*(x.clone() for x in state))
    o = linear_attention_decode(q, k, v, state, slots=torch.tensor([4, -1, 0, 2]), backend=backend)
    assert not o[1].any(), "o of a padded row is not zero"
    assert o[2, 0].isnan().all()
    assert o[[0, 3]].isfinite().all() and o[2, 1].isfinite().all()
    assert state.kv[[0, 2, 4]].isfinite().all() and state.z[[0, 2, 4]].isfinite().all()
    for x, y in zip(state, before, strict=True):
        assert torch.equal(x[[1, 3]], y[[1, 3]]) and x[5].isnan().all()
