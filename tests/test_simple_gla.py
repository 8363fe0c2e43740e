"""The named forms of the scalar-gated family against their papers' own formulas, and what the family refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import silu, softplus

import linattn_tl
from autotune.verify import check_close
from linattn_tl import (
    lightning_attention,
    lightning_attention_decode,
    retention,
    retention_decode,
    simple_gla,
    simple_gla_decode,
    ssd,
    ssd_decode,
)

pytestmark = pytest.mark.usefixtures("binaries")
B, T, H, K, V = 2, 45, 3, 16, 24


def tokens(HV: int = H, T: int = T, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(B, T, heads, d).to(dtype) for heads, d in ((H, K), (H, K), (HV, V))]


def test_the_package_offers_what_its_families_do():
    assert {"simple_gla", "retention_decode", "ssd", "LinearState", "explain"} <= set(dir(linattn_tl))
    assert sorted(linattn_tl.__all__) == dir(linattn_tl)
    assert linattn_tl.ssd is ssd
    with pytest.raises(AttributeError, match="no attribute 'mamba3'"):
        linattn_tl.mamba3  # noqa: B018


# ---- other people's formulas


def test_retention_is_the_parallel_form_of_its_paper():
    """(Q K^T * D) V with D_nm = gamma^(n - m) for n >= m: arXiv 2307.08621, eq. 5."""
    q, k, v = tokens()
    o, _ = retention(q, k, v)
    exact = [x.double().transpose(1, 2) for x in (q, k, v)]
    gamma = 1 - 2 ** (-5 - torch.arange(H, dtype=torch.float64))
    n = torch.arange(T)
    away = n[:, None] - n[None]
    D = torch.where(away >= 0, gamma[:, None, None] ** away.clamp(min=0), 0)
    want = (exact[0] @ exact[1].mT * D) @ exact[2] * K**-0.5
    check_close("o", o, want.transpose(1, 2))


def test_lightning_is_its_recurrence():
    q, k, v = tokens()
    slope = torch.tensor([0.0, 0.3, 2.0])
    o, state = lightning_attention(q, k, v, slope, scale=1.0, output_final_state=True)
    S, want = torch.zeros(B, H, K, V, dtype=torch.float64), torch.zeros(B, T, H, V, dtype=torch.float64)
    for t in range(T):
        S = (-slope.double()).exp()[:, None, None] * S + k[:, t].double().unsqueeze(-1) * v[:, t].double().unsqueeze(-2)
        want[:, t] = (q[:, t].double().unsqueeze(-2) @ S).squeeze(-2)
    check_close("o", o, want)
    assert state is not None
    check_close("state", state, S)


def test_a_slope_has_a_gradient():
    q, k, v = tokens()
    slope = torch.tensor([0.1, 0.3, 2.0], requires_grad=True)
    upstream = torch.randn_like(v)
    (grad,) = torch.autograd.grad(lightning_attention(q, k, v, slope)[0], slope, upstream)
    exact = slope.detach().double().requires_grad_()
    o, _ = lightning_attention(q.double(), k.double(), v.double(), exact)
    check_close("dslope", grad, torch.autograd.grad(o, exact, upstream.double())[0])


def test_gates_of_16_bits_have_gradients_of_16_bits():
    q, k, v = tokens(dtype=torch.bfloat16)
    g = (-torch.rand(B, T, H)).bfloat16().requires_grad_()
    o, _ = simple_gla(q, k, v, g)
    (grad,) = torch.autograd.grad(o.float().square().sum(), g)
    exact = g.detach().double().requires_grad_()
    want = simple_gla(q.double(), k.double(), v.double(), exact)[0]
    (wanted,) = torch.autograd.grad(want.square().sum(), exact)
    assert grad.dtype == torch.bfloat16
    check_close("dg", grad, wanted)


def mamba2(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T, y_t = C_t^T h_t + D x_t, gated: arXiv 2405.21060, eq. 16, fig. 6."""
    dt = softplus(dt + dt_bias)
    heads, groups = x.shape[2], B.shape[2]
    h, y = x.new_zeros(x.shape[0], heads, B.shape[3], x.shape[3]), []
    for t in range(x.shape[1]):
        b, c = (u[:, t].repeat_interleave(heads // groups, 1) for u in (B, C))
        step = dt[:, t]
        h = (step * A).exp()[..., None, None] * h + (step[..., None] * b).unsqueeze(-1) * x[:, t].unsqueeze(-2)
        y.append(torch.einsum("bhn,bhnp->bhp", c, h) + D[:, None] * x[:, t])
    return torch.stack(y, 1) * silu(z), h


def mamba2_inputs(T: int = T) -> dict[str, torch.Tensor]:
    heads, groups, P, N = 4, 2, V, K
    return {
        "x": torch.randn(B, T, heads, P),
        "dt": torch.randn(B, T, heads),
        "A": -torch.rand(heads) * 4,
        "B": torch.randn(B, T, groups, N),
        "C": torch.randn(B, T, groups, N),
        "D": torch.randn(heads),
        "z": torch.randn(B, T, heads, P),
        "dt_bias": torch.randn(heads),
    }


def test_ssd_is_the_recurrence_of_mamba_2_with_all_gradients():
    given = mamba2_inputs()
    exact = {name: x.double().requires_grad_() for name, x in given.items()}
    given = {name: x.requires_grad_() for name, x in given.items()}
    y, state = ssd(**given, dt_softplus=True, output_final_state=True)
    want, want_state = mamba2(**exact)
    assert state is not None
    check_close("y", y.detach(), want.detach())
    check_close("state", state.detach(), want_state.detach())
    up, up_state = torch.randn_like(y), torch.randn_like(state)
    grads = torch.autograd.grad((y, state), list(given.values()), (up, up_state))
    wanted = torch.autograd.grad((want, want_state), list(exact.values()), (up.double(), up_state.double()))
    for name, x, y in zip(given, grads, wanted, strict=True):
        check_close(f"d{name}", x, y)


@pytest.mark.parametrize("form", ["retention", "lightning_attention", "ssd"])
def test_a_form_token_by_token_is_the_form_whole(form: str):
    """By single tokens, by a few at once, and out of a pool."""
    if form == "ssd":
        given = mamba2_inputs()
        fixed = {name: given.pop(name) for name in ("A", "D", "dt_bias")} | {"dt_softplus": True}
        whole, step = ssd, ssd_decode
    else:
        given = dict(zip("qkv", tokens(HV=2 * H), strict=True))
        fixed = {"slope": torch.rand(2 * H)} if form == "lightning_attention" else {}
        whole, step = getattr(linattn_tl, form), getattr(linattn_tl, f"{form}_decode")
    want, final = whole(**given, **fixed, output_final_state=True)
    pool = torch.zeros(B + 1, *final.shape[1:])
    slots = torch.tensor([2, 0])
    parts = [step(**{n: x[:, t] for n, x in given.items()}, **fixed, state=pool, slots=slots) for t in range(7)]
    rest = step(**{n: x[:, 7:] for n, x in given.items()}, **fixed, state=pool, slots=slots)
    check_close("o", torch.cat([torch.stack(parts, 1), rest], 1), want.double())
    check_close("state", pool[slots], final.double())
    assert not pool[1].any()


def test_gradients_of_the_definition_by_finite_differences():
    q, k, v = (x.double()[:1, :5].requires_grad_() for x in tokens())
    g = -torch.rand(1, 5, H, dtype=torch.float64).requires_grad_()
    state = torch.randn(1, H, K, V, dtype=torch.float64).requires_grad_()

    def form(*inputs: torch.Tensor) -> Any:
        return simple_gla(*inputs[:4], initial_state=inputs[4], output_final_state=True)

    assert torch.autograd.gradcheck(form, (q, k, v, g.detach().requires_grad_(), state), fast_mode=True)


@pytest.mark.parametrize("backend", ["binary", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decay_that_leaves_nothing_leaves_the_token_itself(backend: str, dtype: torch.dtype):
    """Requirement R02: with 1e-12 a token, o is the term of the current token."""
    q, k, v = (torch.nn.functional.normalize(x, dim=-1).to(dtype).requires_grad_() for x in tokens(T=64))
    g = torch.full((B, 64, H), -27.6).requires_grad_()
    o, state = simple_gla(q, k, v, g, scale=1.0, output_final_state=True, backend=backend)
    alone = (q.double() * k.double()).sum(-1, keepdim=True) * v.double()
    check_close("o", o.detach(), alone.detach())
    assert state is not None and torch.isfinite(state).all()
    for x in torch.autograd.grad(o.float().sum() + state.sum(), (q, k, v, g)):
        assert torch.isfinite(x).all()


def test_linear_attention_is_the_family_without_decay():
    q, k, v = tokens(HV=2 * H)
    plain = {"feature_map": "identity", "normalize": False, "scale": 0.25}
    want, want_state = linattn_tl.linear_attention(q, k, v, output_final_state=True, **plain)
    o, state = simple_gla(q, k, v, torch.zeros(B, T, 2 * H), scale=0.25, output_final_state=True)
    assert want_state is not None and state is not None
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(state, want_state.kv)


# ---- refusals

Wrong = Callable[[], object]
X = torch.zeros(2, 5, 4, 8)
G = torch.zeros(2, 5, 4)
S = torch.zeros(2, 4, 8, 8)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: simple_gla(X, X, X, G[:, :, :3]), ValueError, r"simple_gla: g has shape \(2, 5, 3\); expected .*HV"),
        (lambda: simple_gla(X, X, X, G.long()), TypeError, "simple_gla: g has dtype int64; expected float32"),
        (lambda: simple_gla(X, X, X, None), TypeError, "simple_gla: g is NoneType"),  # type: ignore[arg-type]
        (lambda: simple_gla(X, X, X, G, initial_state=(S, S)), TypeError, "initial_state is tuple"),  # type: ignore[arg-type]
        (lambda: simple_gla(X, X, X, G, initial_state=S[:1]), ValueError, r"initial_state has shape \(1, 4, 8, 8\)"),
        (lambda: simple_gla(X, X, X, G, initial_state=S.half()), TypeError, "initial_state has dtype float16"),
        (lambda: simple_gla(X, X, X, G, scale=torch.ones(())), TypeError, "scale is Tensor"),  # type: ignore[arg-type]
        (lambda: simple_gla(X, X, X, G, cu_seqlens=torch.tensor([0, 5])), ValueError, "q has B = 2 with cu_seqlens"),
        (lambda: simple_gla(X, X, X, G, chunk_size=64), TypeError, "unexpected keyword"),  # type: ignore[call-arg]
        (lambda: simple_gla(X, X[:, :, :3], X, G), ValueError, r"simple_gla: k has shape \(2, 5, 3, 8\)"),
        (lambda: simple_gla_decode(X[:, 0], X[:, 0], X[:, 0], G, S), ValueError, r"simple_gla_decode: g has shape"),
        (lambda: simple_gla_decode(X, X, X, G, S, slots=torch.tensor([0, 5])), ValueError, "slots"),
        (lambda: simple_gla_decode(X, X, X, G, S.requires_grad_()), ValueError, "state requires a gradient"),
        (lambda: retention(X, X, X[0]), ValueError, r"retention: v has shape \(5, 4, 8\); expected 4 axes"),
        (lambda: retention_decode(X[0, 0], X[0, 0], X[0, 0], S), ValueError, "retention_decode: v has shape"),
        (
            lambda: lightning_attention(X, X, X, G[0, 0, :3]),
            ValueError,
            r"slope has shape \(3,\); expected \[HV\] = \(4,\)",
        ),
        (lambda: lightning_attention_decode(X, X, X, None, S), TypeError, "slope is NoneType"),  # type: ignore[arg-type]
        (lambda: ssd(X, G, G[0, 0], X[:, :, :3], X[:, :, :3]), ValueError, "4 heads; expected a multiple of 3 groups"),
        (lambda: ssd(X, G, G[0, 0, :2], X, X), ValueError, r"ssd: A has shape \(2,\); expected \[heads\] = \(4,\)"),
        (lambda: ssd(X, G[..., None], G[0, 0], X, X), ValueError, "ssd: dt has shape"),
    ],
)
def test_what_is_refused(call: Wrong, error: type[Exception], said: str):
    S.requires_grad_(False)
    with pytest.raises(error, match=said):
        call()
    S.requires_grad_(False)


def test_what_serves_a_named_form():
    """By its own arguments; its calls are calls of simple_gla."""
    q, k, v = tokens()
    state = torch.randn(B, H, K, V)
    one = [x[:, 0] for x in (q, k, v)]
    slope = torch.rand(v.shape[2])
    calls = [
        (retention, (q, k, v), {"scale": 0.1}),
        (lightning_attention, (q, k, v, slope), {"initial_state": state, "output_final_state": True}),
        (ssd, (v, torch.rand(v.shape[:3]), -slope, k, q), {"D": slope, "dt_softplus": True}),
        (retention_decode, (*one, state.clone()), {}),
        (lightning_attention_decode, (*one, slope, state.clone()), {"backend": "torch"}),
        (ssd_decode, (one[2], torch.rand(v.shape[0], v.shape[2]), -slope, one[1], one[0], state.clone()), {"D": slope}),
    ]
    for call, args, kwargs in calls:
        said = linattn_tl.explain(call, *args, **kwargs)
        assert said == linattn_tl.explain(call.__name__, *args, **kwargs)
        call(*args, **kwargs)
        assert said.backend == linattn_tl.last_backend(call.__name__) == linattn_tl.last_backend(said.op)
        assert said.op == ("simple_gla_decode" if call.__name__.endswith("_decode") else "simple_gla")
    with pytest.raises(ValueError, match="retention: v has shape"):
        linattn_tl.explain("retention", q, k, v[0])
    with pytest.raises(ValueError, match=r"op is 'attention'; expected one of .*retention"):
        linattn_tl.explain("attention", q)
