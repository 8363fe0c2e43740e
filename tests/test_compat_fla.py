"""linattn_tl.compat.fla: names, order and defaults as there, the formulas of their documentation, states both ways."""

import inspect
from typing import Any

import pytest
import torch

from autotune.verify import check_close
from linattn_tl.compat import fla
from linattn_tl.ops.delta_rule.definition import Options as DeltaOptions
from linattn_tl.ops.delta_rule.definition import normalized
from linattn_tl.ops.delta_rule.definition import recurrent as delta
from linattn_tl.ops.simple_gla.definition import Options, recurrent

pytestmark = pytest.mark.usefixtures("binaries")
B, T, H, HV, K, V = 2, 37, 2, 4, 16, 24

# positional arguments of fla-core 0.6.0, with those of its keywords that have an effect
SIGNATURES = {
    "chunk_gated_delta_rule": "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel "
    "use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu chunk_indices cp_context "
    "use_gate_in_kernel A_log dt_bias chunk_size",
    "fused_recurrent_gated_delta_rule": "q k v g gk gv beta scale initial_state output_final_state "
    "use_qk_l2norm_in_kernel use_gate_in_kernel A_log dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval "
    "state_v_first cu_seqlens",
    "chunk_delta_rule": "q k v beta scale initial_state output_final_state use_qk_l2norm_in_kernel cu_seqlens "
    "cu_seqlens_cpu chunk_size",
    "fused_recurrent_delta_rule": "q k v beta scale initial_state output_final_state use_qk_l2norm_in_kernel "
    "cu_seqlens",
    "chunk_linear_attn": "q k v scale initial_state output_final_state normalize cu_seqlens",
    "fused_recurrent_linear_attn": "q k v scale initial_state output_final_state reverse normalize cu_seqlens",
    "chunk_simple_gla": "q k v g g_gamma scale initial_state output_final_state state_v_first cu_seqlens "
    "cu_seqlens_cpu chunk_size",
    "chunk_retention": "q k v scale initial_state output_final_state cu_seqlens chunk_size",
    "chunk_lightning_attn": "q k v layer_idx num_layers scale initial_state output_final_state cu_seqlens chunk_size",
}


def test_signatures():
    assert set(SIGNATURES) == set(fla.__all__)
    for name, arguments in SIGNATURES.items():
        assert " ".join(inspect.signature(getattr(fla, name)).parameters) == arguments, name


def tokens(heads: int = HV) -> tuple[torch.Tensor, ...]:
    """q, k of length 1, v, g, beta."""
    q, k = torch.randn(B, T, H, K), normalized(torch.randn(B, T, H, K))
    return q, k, torch.randn(B, T, heads, V), -torch.rand(B, T, heads), torch.rand(B, T, heads)


def exact_delta(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any = None, norm: bool = False) -> Any:
    wide = [None if x is None else x.double() for x in (q, k, v, g, beta)]
    state = torch.zeros(B, v.shape[2], K, V).double() if state is None else state.double()
    return delta(*wide, state, DeltaOptions(K**-0.5, norm))  # type: ignore[call-arg]


def exact_gla(q: Any, k: Any, v: Any, g: Any, scale: float = K**-0.5) -> Any:
    q, k, v, g = (x.double() for x in (q, k, v, g))
    return recurrent(q, k, v, g, torch.zeros(B, v.shape[2], K, V).double(), Options(scale))


def close(found: Any, right: Any) -> None:
    for name, x, y in zip(("o", "state"), found, right, strict=True):
        check_close(name, x, y, dtype="float32")


@pytest.mark.parametrize("form", [fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule])
def test_gated_delta_rule(form: Any):
    q, k, v, g, beta = tokens()
    state = torch.randn(B, HV, K, V)
    right = exact_delta(3 * q, 2 * k, v, g, beta, state, norm=True)
    call = {"g": g, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    close(form(3 * q, 2 * k, v, initial_state=state, **call), right)
    o, last = form(q, k, v, initial_state=state.mT.contiguous(), state_v_first=True, **call)
    close((o, last.mT), exact_delta(q, k, v, g, beta, state, norm=True))
    assert last.shape == (B, HV, V, K) and last.is_contiguous() and last.dtype == torch.float32
    assert form(q, k, v, g=g, beta=beta)[1] is None
    halves = form(q, k, v, initial_state=state.bfloat16(), **call)
    close(halves, exact_delta(q, k, v, g, beta, state.bfloat16(), norm=True))
    close(form(q, k, v, **(call | {"g": None})), exact_delta(q, k, v, None, beta, norm=True))


@pytest.mark.parametrize("form", [fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule])
def test_gates_and_logits_in_the_kernel(form: Any):
    q, k, v, _, _ = tokens()
    raw, logit, A_log, bias = torch.randn(B, T, HV), torch.randn(B, T, HV), torch.rand(HV), torch.randn(HV)
    g = -A_log.double().exp() * torch.nn.functional.softplus(raw.double() + bias.double())
    found = form(
        q, k, v, g=raw, beta=logit, output_final_state=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=bias,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
    )  # fmt: skip
    close(found, exact_delta(q, k, v, g, 2 * logit.double().sigmoid()))
    with pytest.raises(ValueError, match="A_log is None with use_gate_in_kernel=True"):
        form(q, k, v, g=raw, beta=logit, use_gate_in_kernel=True)


def test_delta_rule():
    q, k, v, _, beta = tokens()
    close(fla.chunk_delta_rule(q, k, v, beta, None, None, True), exact_delta(q, k, v, None, beta))
    ones = torch.ones_like(beta)
    close(fla.fused_recurrent_delta_rule(q, k, v, output_final_state=True), exact_delta(q, k, v, None, ones))
    close(fla.fused_recurrent_gated_delta_rule(q, k, v, output_final_state=True), exact_delta(q, k, v, None, ones))


def test_simple_gla_and_its_forms():
    q, k, v, g, _ = tokens()
    close(fla.chunk_simple_gla(q, k, v, g, output_final_state=True), exact_gla(q, k, v, g))
    gamma = -torch.rand(HV)
    close(fla.chunk_simple_gla(q, k, v, g_gamma=gamma, output_final_state=True), exact_gla(q, k, v, gamma.expand_as(g)))
    close(fla.chunk_simple_gla(q, k, v, scale=1.0, output_final_state=True), exact_gla(q, k, v, 0 * g, 1.0))
    v, heads = v[:, :, :H], torch.arange(H).double()
    close(
        fla.chunk_retention(q, k, v, output_final_state=True),
        exact_gla(q, k, v, torch.log(1 - 2.0 ** (-5 - heads)).expand(B, T, H)),
    )
    close(
        fla.chunk_lightning_attn(q, k, v, 3, 12, output_final_state=True),
        exact_gla(q, k, v, (-8 / H * (1 - 3 / 12) * heads).expand(B, T, H)),
    )
    with pytest.raises(ValueError, match="g and g_gamma are both given"):
        fla.chunk_simple_gla(q, k, tokens()[2], g, gamma)


@pytest.mark.parametrize("form", [fla.chunk_linear_attn, fla.fused_recurrent_linear_attn])
def test_linear_attention_with_its_normaliser(form: Any):
    """o / (scale q_t . z_t + 1e-10), z the sum of keys, states handed over as (kv, z [B, 1, H, K])."""
    q, k, v = torch.rand(B, T, H, K), torch.rand(B, T, H, K), torch.randn(B, T, H, V)
    z = k.double().cumsum(1)
    o, kv = exact_gla(q, k, v, torch.zeros(B, T, H))
    o = o / (K**-0.5 * (q.double() * z).sum(-1, keepdim=True) + 1e-10)
    found, (state, last) = form(q, k, v, output_final_state=True, normalize=True)
    close((found, state), (o, kv))
    check_close("z", last, z[:, -1:])
    assert form(q, k, v, normalize=True)[1][0] is None
    assert form(q, k, v, normalize=False)[1] is None
    a, carried = form(q[:, :20], k[:, :20], v[:, :20], output_final_state=True, normalize=True)
    b, (state, last) = form(q[:, 20:], k[:, 20:], v[:, 20:], None, carried, True, normalize=True)
    close((torch.cat([a, b], 1), state), (o, kv))
    check_close("z", last, z[:, -1:])


def test_linear_attention_backwards():
    q, k, v = torch.rand(B, T, H, K), torch.rand(B, T, H, K), torch.randn(B, T, H, V)
    found, state = fla.fused_recurrent_linear_attn(q, k, v, output_final_state=True, reverse=True)
    o, kv = exact_gla(*(x.flip(1) for x in (q, k, v)), torch.zeros(B, T, H))
    close((found, state), (o.flip(1), kv))
    with pytest.raises(NotImplementedError, match="reverse=True with cu_seqlens"):
        fla.fused_recurrent_linear_attn(q[:1], k[:1], v[:1], reverse=True, cu_seqlens=torch.tensor([0, T]))


def test_packed_sequences_and_gradients():
    q, k, v, g, beta = (x[:1].requires_grad_() for x in tokens())
    cu = torch.tensor([0, 5, 5, T], dtype=torch.int32)
    o, state = fla.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu, output_final_state=True)
    assert state is not None and state.shape == (3, HV, K, V)
    alone, _ = fla.chunk_gated_delta_rule(q[:, 5:], k[:, 5:], v[:, 5:], g[:, 5:], beta[:, 5:])
    torch.testing.assert_close(o[:, 5:], alone)
    for x in torch.autograd.grad(o.sum() + state.sum(), (q, k, v, g, beta)):
        assert x.isfinite().all() and x.any()


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda q, k, v, g, b: fla.chunk_gated_delta_rule(q, k, v, g, v.sigmoid()),
            NotImplementedError,
            "expected one number a head",
        ),
        (
            lambda q, k, v, g, b: fla.chunk_gated_delta_rule(q, k, v, None, b, use_gate_in_kernel=True, A_log=b[0, 0]),
            ValueError,
            "g is None with use_gate_in_kernel=True",
        ),
        (lambda *x: fla.chunk_gated_delta_rule(*x, cp_context=object()), NotImplementedError, "cp_context is given"),
        (lambda *x: fla.chunk_gated_delta_rule(*x, head_first=False), TypeError, "unexpected keyword"),
        (lambda q, k, v, g, b: fla.fused_recurrent_gated_delta_rule(q, k, v, gk=k), NotImplementedError, "gk is given"),
        (
            lambda *x: fla.chunk_gated_delta_rule(*x, allow_neg_eigval=True),
            ValueError,
            "expected use_beta_sigmoid_in_kernel=True",
        ),
        (lambda *x: fla.chunk_gated_delta_rule(*x, initial_state=1), TypeError, "initial_state is int"),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        call(*tokens())
