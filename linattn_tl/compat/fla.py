"""Functions named, called and answering as flash-linear-attention's (`fla.ops`), on our ops.

    from linattn_tl.compat.fla import chunk_gated_delta_rule

Arguments, their order, defaults and results are those of fla 0.6: [B, T, H, ...] tensors, states [N, HV, K, V] (or
[N, HV, V, K] with state_v_first), a pair (o, final state or None). Differences: any dtype and device is served; states
that come out are fp32; the chunked and the recurrent form of an op are the same function here. What only steers their
kernels (cu_seqlens_cpu, chunk_indices, chunk_size) is taken and has no effect. What has no counterpart (gates and betas
of each channel, g beside g_gamma, a reversed walk over packed sequences, context parallelism) is refused by name, and
an unknown keyword by Python.
"""

from typing import Any

import torch

from linattn_tl.ops.delta_rule import delta_rule, gated_delta_rule
from linattn_tl.ops.linear_attention import LinearState, linear_attention
from linattn_tl.ops.simple_gla import lightning_attention, retention, simple_gla

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_linear_attn",
]

Tensor = torch.Tensor
EPS = 1e-10  # of the normaliser, as there


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """gated_delta_rule; with use_gate_in_kernel, g is the raw gate, and A_log is needed.

        Sbar = exp(g_t) S_{t-1}    u_t = beta_t (v_t - Sbar^T k_t)    S_t = Sbar + k_t u_t^T    o_t = scale q_t^T S_t

    Raises NotImplementedError for cp_context, otherwise as linattn_tl.gated_delta_rule. Source: as there.
    """
    op = "chunk_gated_delta_rule"
    _refuse(op, cp_context=cp_context)
    if use_gate_in_kernel and (A_log is None or g is None):
        missing = "A_log" if A_log is None else "g"
        raise ValueError(f"{op}: {missing} is None with use_gate_in_kernel=True; expected a tensor")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(f"{op}: allow_neg_eigval=True; expected use_beta_sigmoid_in_kernel=True with it")
    if beta.ndim == v.ndim:
        raise NotImplementedError(f"{op}: beta has shape {tuple(beta.shape)}; expected one number a head, [B, T, HV]")
    shared: dict[str, Any] = {
        "scale": scale,
        "qk_l2norm": use_qk_l2norm_in_kernel,
        "beta_is_logit": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
        "initial_state": _state_in(initial_state, q, state_v_first),
        "output_final_state": output_final_state,
        "cu_seqlens": cu_seqlens,
    }
    if g is None:
        o, state = delta_rule(q, k, v, beta, **shared)
    else:
        gate: dict[str, Any] = {"A_log": A_log, "dt_bias": dt_bias} if use_gate_in_kernel else {}
        o, state = gated_delta_rule(q, k, v, g, beta, **shared, **gate)
    return o, _state_out(state, state_v_first)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """chunk_gated_delta_rule in another order of arguments; beta=None is 1. gk and gv are refused."""
    _refuse("fused_recurrent_gated_delta_rule", gk=gk, gv=gv)
    return chunk_gated_delta_rule(
        q, k, v, g, _ones_of(v) if beta is None else beta, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens,
        use_gate_in_kernel=use_gate_in_kernel, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """linattn_tl.delta_rule: recurrence, errors and source as there; beta=None is 1."""
    return delta_rule(
        q, k, v, _ones_of(v) if beta is None else beta, scale=scale, qk_l2norm=use_qk_l2norm_in_kernel,
        initial_state=_state_in(initial_state, q), output_final_state=output_final_state, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """chunk_delta_rule, where beta may be left out."""
    return chunk_delta_rule(
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """linattn_tl.simple_gla: recurrence, errors and source as there.

    g [B, T, HV] is the logarithm of a decay of each token, g_gamma [HV] one of each head; neither is no decay.
    """
    if g is not None and g_gamma is not None:
        raise ValueError("chunk_simple_gla: g and g_gamma are both given; expected one of them, or none")
    shared: dict[str, Any] = {
        "scale": scale,
        "initial_state": _state_in(initial_state, q, state_v_first),
        "output_final_state": output_final_state,
        "cu_seqlens": cu_seqlens,
    }
    if g is not None:
        o, state = simple_gla(q, k, v, g, **shared)
    else:
        slope = v.new_zeros(v.shape[-2], dtype=torch.float32) if g_gamma is None else -g_gamma
        o, state = lightning_attention(q, k, v, slope, **shared)
    return o, _state_out(state, state_v_first)


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """linattn_tl.retention: recurrence, errors and source as there."""
    return retention(
        q, k, v, scale=scale, initial_state=_state_in(initial_state, q), output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """linattn_tl.lightning_attention with the slope of head h in a layer: 8 h / H (1 - layer_idx / num_layers).

    Recurrence, errors and source as there.
    """
    H = q.shape[2]
    slope = 8 / H * (1 - layer_idx / num_layers) * torch.arange(H, dtype=torch.float32, device=q.device)
    return lightning_attention(
        q, k, v, slope, scale=scale, initial_state=_state_in(initial_state, q), output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """linattn_tl.linear_attention without a feature map: q and k have gone through one.

        S_t = S_{t-1} + k_t v_t^T    z_t = z_{t-1} + k_t    o_t = scale q_t^T S_t, over scale q_t . z_t + 1e-10

    Args:
        initial_state: kv [N, H, K, V]; with normalize also (kv, z [N, 1, H, K]), either of which may be None.

    Returns:
        (o, kv or None); with normalize (o, (kv or None, z)), as there.

    Source: Katharopoulos et al. 2020, arXiv 2006.16236, eq. 16-20.
    """
    kv, z = initial_state if isinstance(initial_state, tuple | list) else (initial_state, None)
    start = None if kv is None and z is None else _linear_state(q, v, kv, z, cu_seqlens)
    o, final = linear_attention(
        q, k, v, feature_map="identity", normalize=normalize, scale=scale, eps=EPS, initial_state=start,
        output_final_state=output_final_state or normalize, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if final is None:
        return o, None
    left = final.kv if output_final_state else None
    return (o, (left, final.z.unsqueeze(1))) if normalize else (o, left)


def fused_recurrent_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """chunk_linear_attn with another default; reverse walks from the last token to the first."""
    if not reverse:
        return chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens)
    if cu_seqlens is not None:
        raise NotImplementedError("fused_recurrent_linear_attn: reverse=True with cu_seqlens; expected one of them")
    q, k, v = (x.flip(1) for x in (q, k, v))
    o, state = chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize)
    return o.flip(1), state


def _refuse(op: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{op}: {name} is given; expected None, there is no kernel for it")


def _ones_of(v: Tensor) -> Tensor:
    return v.new_ones(v.shape[:-1], dtype=torch.float32)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _state_in(state: Tensor | None, q: Tensor, v_first: bool = False) -> Tensor | None:
    """A state as our ops take it: of any dtype there, fp32 here."""
    if not isinstance(state, Tensor):
        return state
    return (state.mT if v_first else state).to(_wide(q))


def _state_out(state: Tensor | None, v_first: bool) -> Tensor | None:
    return state.mT.contiguous() if v_first and state is not None else state


def _linear_state(q: Tensor, v: Tensor, kv: Any, z: Any, cu_seqlens: Any) -> LinearState:
    """What is missing of it is zeros."""
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if kv is None:
        kv = q.new_zeros(N, v.shape[2], q.shape[3], v.shape[3], dtype=_wide(q))
    z = q.new_zeros(N, q.shape[2], q.shape[3], dtype=_wide(q)) if z is None else z.reshape(N, *q.shape[2:])
    return LinearState(kv.to(_wide(q)), z.to(_wide(q)))
