"""The delta rule against its papers' own formulas, its gates and logits, what must hold, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize, softplus

import linattn_tl
from autotune.verify import check_close
from linattn_tl import delta_rule, delta_rule_decode, gated_delta_rule, gated_delta_rule_decode

pytestmark = pytest.mark.usefixtures("binaries")
B, T, H, K, V = 2, 45, 3, 16, 24


def tokens(HV: int = H, T: int = T, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """q, k of length 1, v, g and beta."""
    return {
        "q": torch.randn(B, T, H, K).to(dtype),
        "k": normalize(torch.randn(B, T, H, K), dim=-1).to(dtype),
        "v": torch.randn(B, T, HV, V).to(dtype),
        "g": -torch.rand(B, T, HV),
        "beta": torch.rand(B, T, HV),
    }


# ---- other people's formulas


def test_the_delta_rule_is_a_product_of_householder_matrices():
    """S_t = S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T, o_t = S_t q_t: arXiv 2406.06484, eq. 5, S as [V, K]."""
    x = tokens()
    o, state = delta_rule(x["q"], x["k"], x["v"], x["beta"], scale=1.0, output_final_state=True)
    q, k, v, beta = (x[name].double() for name in ("q", "k", "v", "beta"))
    S, want = torch.zeros(B, H, V, K, dtype=torch.float64), torch.zeros(B, T, H, V, dtype=torch.float64)
    for t in range(T):
        along = beta[:, t, :, None, None] * k[:, t, :, :, None] * k[:, t, :, None]
        S = S @ (torch.eye(K).double() - along) + beta[:, t, :, None, None] * v[:, t, :, :, None] * k[:, t, :, None]
        want[:, t] = (S @ q[:, t].unsqueeze(-1)).squeeze(-1)
    check_close("o", o, want, dtype="float32")
    check_close("state", state, S.mT, dtype="float32")


def gated_recurrence(q: Any, k: Any, v: Any, alpha: Any, beta: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T: arXiv 2412.06464, eq. 10, S as [V, K]."""
    S, o = torch.zeros(B, v.shape[2], V, K, dtype=torch.float64), []
    for t in range(q.shape[1]):
        along = beta[:, t, :, None, None] * k[:, t, :, :, None] * k[:, t, :, None]
        S = alpha[:, t, :, None, None] * S @ (torch.eye(K).double() - along)
        S = S + beta[:, t, :, None, None] * v[:, t, :, :, None] * k[:, t, :, None]
        o.append((S @ q[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(o, 1), S.mT


@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("backend", ["binary", "torch"])
def test_raw_gates_and_logits_with_all_gradients(backend: str, doubled: bool):
    """alpha = exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b) or twice that, q and k of length 1."""
    x = tokens(HV=2 * H)
    x |= {"k": torch.randn(B, T, H, K), "g": torch.randn(B, T, 2 * H), "beta": torch.randn(B, T, 2 * H)}
    x |= {"A_log": torch.rand(2 * H), "dt_bias": torch.randn(2 * H)}
    leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
    o, state = gated_delta_rule(
        **leaves, scale=0.5, qk_l2norm=True, beta_is_logit=True, allow_neg_eigval=doubled, output_final_state=True,
        backend=backend,
    )  # fmt: skip
    exact = {name: y.double().requires_grad_() for name, y in x.items()}
    unit = [
        (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(2, 2) for y in map(exact.get, "qk")
    ]
    alpha = torch.exp(-exact["A_log"].exp() * softplus(exact["g"] + exact["dt_bias"]))
    beta = exact["beta"].sigmoid() * (2 if doubled else 1)
    want = gated_recurrence(0.5 * unit[0], unit[1], exact["v"], alpha, beta)
    check_close("o", o.detach(), want[0].detach())
    assert state is not None
    check_close("state", state.detach(), want[1].detach())
    upstream = [torch.randn(y.shape) for y in want]
    found = torch.autograd.grad([o, state], list(leaves.values()), upstream)
    right = torch.autograd.grad(want, list(exact.values()), [y.double() for y in upstream])
    for name, y, z in zip(x, found, right, strict=True):
        check_close(f"d{name}", y, z)


def test_raw_gates_step_by_step():
    x = tokens(HV=2 * H, T=7)
    x |= {"g": torch.randn(B, 7, 2 * H), "beta": torch.randn(B, 7, 2 * H)}
    of_heads: dict[str, Any] = {"A_log": torch.rand(2 * H), "dt_bias": torch.randn(2 * H), "beta_is_logit": True}
    o, final = gated_delta_rule(**x, **of_heads, output_final_state=True)
    state = torch.zeros(B, 2 * H, K, V)
    for t in range(7):
        one = gated_delta_rule_decode(**{n: y[:, t] for n, y in x.items()}, **of_heads, state=state)
        check_close("o", one, o[:, t].double())
    check_close("state", state, final.double())  # type: ignore[union-attr]


def test_gradients_of_the_definition_by_finite_differences():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 5, 1, 3, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    g = (-torch.rand(1, 5, 1, dtype=torch.float64)).requires_grad_()
    beta = torch.rand(1, 5, 1, dtype=torch.float64).requires_grad_()
    state = torch.randn(1, 1, 3, 3, dtype=torch.float64, requires_grad=True)

    def call(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
        return gated_delta_rule(q, k, v, g, beta, qk_l2norm=True, initial_state=state, output_final_state=True)

    assert torch.autograd.gradcheck(call, (q, k, v, g, beta, state))
    assert torch.autograd.gradgradcheck(call, (q, k, v, g, beta, state), atol=1e-4)


# ---- what must hold


@pytest.mark.parametrize("backend", ["binary", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_decay_is_the_delta_rule_bit_for_bit(backend: str, dtype: torch.dtype):
    x = tokens(dtype=dtype) | {"g": torch.zeros(B, T, H)}
    found = gated_delta_rule(**x, output_final_state=True, backend=backend)
    plain = delta_rule(**{n: y for n, y in x.items() if n != "g"}, output_final_state=True, backend=backend)
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[1], plain[1])  # type: ignore[arg-type]


def test_without_beta_the_state_only_decays():
    x = tokens() | {"beta": torch.zeros(B, T, H)}
    start = torch.randn(B, H, K, V)
    _, state = gated_delta_rule(**x, initial_state=start, output_final_state=True)
    check_close("state", state, x["g"].double().sum(1).exp()[..., None, None] * start.double())


def test_a_key_written_with_beta_1_reads_back_its_value():
    x = tokens() | {"beta": torch.ones(B, T, H)}
    o, _ = delta_rule(x["k"], x["k"], x["v"], x["beta"], scale=1.0)
    torch.testing.assert_close(o, x["v"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", ["binary", "torch"])
def test_a_long_sequence_without_decay_is_its_segments_and_its_steps(backend: str):
    """beta = 1 and no decay for 4096 tokens: nothing is ever forgotten but by being overwritten."""
    torch.manual_seed(0)
    n, D = 4096, 32
    q, v = torch.randn(1, n, 1, D), torch.randn(1, n, 1, D)
    k, beta = normalize(torch.randn(1, n, 1, D), dim=-1), torch.ones(1, n, 1)
    o, final = delta_rule(q, k, v, beta, output_final_state=True, backend=backend)
    parts, state = [], None
    for a in range(0, n, 1000):
        at = slice(a, a + 1000)
        part, state = delta_rule(
            q[:, at], k[:, at], v[:, at], beta[:, at], initial_state=state, output_final_state=True, backend=backend
        )
        parts.append(part)
    stepped = torch.zeros(1, 1, D, D)
    steps = delta_rule_decode(q, k, v, beta, stepped, backend=backend)
    for name, x, y in (("segments", torch.cat(parts, 1), state), ("steps", steps, stepped)):
        assert y is not None and final is not None
        for what, found, whole in (("o", x, o), ("state", y, final)):
            error = (found - whole).norm() / whole.norm()
            assert error <= 1e-5, f"{what} by {name} is {error:.1e} off"


@pytest.mark.parametrize("HV", [16, 32, 48, 64])
def test_heads_of_qwen3_next(HV: int):
    q, k = torch.randn(1, 66, 16, K), normalize(torch.randn(1, 66, 16, K), dim=-1)
    v, g, beta = torch.randn(1, 66, HV, V), -torch.rand(1, 66, HV), torch.rand(1, 66, HV)
    o, _ = gated_delta_rule(q, k, v, g, beta)
    for h in (0, HV // 16, HV - 1):
        mine = slice(h * 16 // HV, h * 16 // HV + 1), slice(h, h + 1)
        alone, _ = gated_delta_rule(q[:, :, mine[0]], k[:, :, mine[0]], *(x[:, :, mine[1]] for x in (v, g, beta)))
        check_close(f"head {h}", o[:, :, mine[1]], alone.double(), dtype="float32")


# ---- what is refused, and what serves

Wrong = Callable[..., Any]
X = {"q": (1, 4, 2, 8), "k": (1, 4, 2, 8), "v": (1, 4, 2, 8), "g": (1, 4, 2), "beta": (1, 4, 2)}


X_INT = torch.zeros(1, 4, 2, dtype=torch.int32)


def given(**other: Any) -> dict[str, Any]:
    return {**{name: torch.zeros(shape) for name, shape in X.items()}, **other}


def step(**other: Any) -> dict[str, Any]:
    state = torch.zeros(1, 2, 8, 8)
    return {**{name: torch.zeros(shape[0], *shape[2:]) for name, shape in X.items()}, "state": state, **other}


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: gated_delta_rule(**given(g=torch.zeros(1, 4, 3))), ValueError, r"gated_delta_rule: g has shape"),
        (lambda: gated_delta_rule(**given(beta=torch.zeros(1, 4))), ValueError, r"gated_delta_rule: beta has shape"),
        (lambda: gated_delta_rule(**given(beta=None)), TypeError, r"gated_delta_rule: beta is NoneType"),
        (lambda: gated_delta_rule(**given(g=None)), TypeError, r"gated_delta_rule: g is NoneType"),
        (lambda: gated_delta_rule_decode(**step(g=None)), TypeError, r"gated_delta_rule_decode: g is NoneType"),
        (lambda: gated_delta_rule(**given(dt_bias=torch.zeros(2))), ValueError, "dt_bias is given without A_log"),
        (lambda: gated_delta_rule(**given(A_log=torch.zeros(3))), ValueError, r"A_log has shape \(3,\)"),
        (lambda: gated_delta_rule(**given(A_log=0.5)), TypeError, "A_log is float"),
        (lambda: gated_delta_rule(**given(allow_neg_eigval=True)), ValueError, "expected beta_is_logit=True"),
        (lambda: gated_delta_rule(**given(g=torch.zeros(1, 4, 2, dtype=torch.int32))), TypeError, "g has dtype"),
        (lambda: gated_delta_rule(**given(beta=X_INT, beta_is_logit=True)), TypeError, "beta has dtype int32"),
        (lambda: gated_delta_rule(**given(A_log=torch.zeros(2), dt_bias=X_INT[0, 0])), TypeError, "dt_bias has dtype"),
        (
            lambda: gated_delta_rule(**given(cu_seqlens=torch.tensor([0, 3]))),
            ValueError,
            "^gated_delta_rule: cu_seqlens",
        ),
        (
            lambda: gated_delta_rule_decode(**step(slots=torch.tensor([7]))),
            ValueError,
            "^gated_delta_rule_decode: slots",
        ),
        (lambda: gated_delta_rule(**given(scale="no")), TypeError, "gated_delta_rule: scale is str"),
        (lambda: gated_delta_rule(**given(initial_state=torch.zeros(2, 2, 8, 8))), ValueError, "initial_state has"),
        (lambda: gated_delta_rule_decode(**step(state=torch.zeros(1, 2, 8, 9))), ValueError, "state has shape"),
        (lambda: gated_delta_rule_decode(**step(q=torch.zeros(1, 2, 8).requires_grad_())), ValueError, "q requires"),
        (lambda: delta_rule(**given()), TypeError, "unexpected keyword argument 'g'"),
    ],
)  # fmt: skip
def test_what_is_refused(call: Wrong, error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        call()


def test_what_serves_the_gated_form():
    x = given(beta=torch.ones(1, 4, 2))
    gated_delta_rule(**x)
    assert linattn_tl.last_backend("gated_delta_rule") == "binary"
    assert linattn_tl.explain("gated_delta_rule", **x).backend == "binary"
    assert linattn_tl.explain("gated_delta_rule_decode", **step(), A_log=torch.zeros(2)).backend == "binary"
    found = linattn_tl.preload("gated_delta_rule", K=8, V=8)
    assert set(found) == {"delta_rule float32", "delta_rule_decode float32"}
