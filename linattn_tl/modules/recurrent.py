"""Layers whose memory is a matrix of constant size: projections, a short convolution, a recurrence, norm and gate.

Each is one of our ops between projections. `forward` reads whole sequences at once, `step` one token; they agree:

    y, state = layer(x, keep_state=True)        # x [B, T, width]
    y1 = layer.step(x1, state)                  # x1 [B, width], under no_grad; the state changes in place

Widths: `heads` q/k heads of key_dim, `value_heads` (a multiple of heads) of value_dim.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from linattn_tl import calls
from linattn_tl.modules.convolution import ShortConvolution
from linattn_tl.modules.norms import RMSNorm
from linattn_tl.modules.packing import SequenceModule, sequences_of
from linattn_tl.modules.states import RecurrentState, check_kind, check_no_gradient, check_shapes
from linattn_tl.ops.delta_rule import delta_rule, delta_rule_decode, gated_delta_rule, gated_delta_rule_decode
from linattn_tl.ops.linear_attention import linear_attention, linear_attention_decode
from linattn_tl.ops.simple_gla import retention, retention_decode, simple_gla, simple_gla_decode, ssd, ssd_decode

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class RecurrentLayer(SequenceModule):
    """What the layers of this module share. A subclass names its ops, and says what else they are called with.

    Args:
        width: of the tokens, and of the result.
        heads: q/k heads.
        value_heads: a multiple of heads; as many when None.
        key_dim, value_dim: of a head; width / heads when None.
        conv_size: tokens that the short convolution over q, k and v sees; 0 for none.
        conv_bias, conv_silu: whether it has a bias, and SiLU after it.
        gate: whether silu of a projection of x multiplies the result.
        norm: whether an RMSNorm over each head's values comes before.
        backend: of the ops.
        device, dtype: of the parameters.
    """

    ops: ClassVar[tuple[Callable[..., Any], Callable[..., Any]]]  # over whole sequences, and of a step
    controls_per_head: ClassVar[int] = 0  # numbers of each value head and token beside q, k and v
    normalizes: ClassVar[bool] = False  # the state has a running sum of keys

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        value_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        conv_size: int = 0,
        conv_bias: bool = False,
        conv_silu: bool = True,
        gate: bool = False,
        norm: bool = False,
        norm_eps: float = 1e-6,
        backend: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        name = type(self).__name__
        self.width, self.heads, self.backend = width, heads, backend
        self.value_heads = heads if value_heads is None else value_heads
        if heads < 1 or self.value_heads % heads:
            raise ValueError(f"{name}: value_heads is {self.value_heads}; expected a multiple of heads = {heads}")
        if (key_dim is None or value_dim is None) and width % heads:
            raise ValueError(
                f"{name}: width is {width}; expected a multiple of heads = {heads}, or key_dim and value_dim"
            )
        self.key_dim = width // heads if key_dim is None else key_dim
        self.value_dim = width // heads if value_dim is None else value_dim
        made = {"device": device, "dtype": dtype}
        keys, values = heads * self.key_dim, self.value_heads * self.value_dim
        self.qkv = nn.Linear(width, 2 * keys + values, bias=False, **made)
        self.conv = None
        if conv_size:
            self.conv = ShortConvolution(2 * keys + values, conv_size, bias=conv_bias, silu=conv_silu, **made)
        controls = self.controls_per_head * self.value_heads
        self.controls = nn.Linear(width, controls, bias=False, **made) if controls else None
        self.gate = nn.Linear(width, values, bias=False, **made) if gate else None
        self.norm = RMSNorm(self.value_dim, eps=norm_eps, **made) if norm else None
        self.out = nn.Linear(values, width, bias=False, **made)

    def _read(
        self, x: torch.Tensor, state: RecurrentState | None, keep_state: bool, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, RecurrentState | None]:
        sequences = sequences_of(type(self).__name__, x, cu_seqlens)
        if state is not None:
            self.check_state(state, sequences)
        mixed, conv = self.qkv(x), None
        if self.conv is not None:
            mixed, conv = self.conv(mixed, None if state is None else state.conv, cu_seqlens)
        args, options = self._arguments(*self._heads_of(mixed), x)
        o, memory = self.ops[0](
            *args,
            initial_state=None if state is None else self._memory(state),
            output_final_state=keep_state,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
            **options,
        )
        y = self._result(o, x)
        if not keep_state:
            return y, None
        kv, z = memory if self.normalizes else (memory, None)
        return y, RecurrentState(kv, z, None if conv is None else conv.clone())  # it is a view of all tokens

    def step(self, x: torch.Tensor, state: RecurrentState) -> torch.Tensor:
        """The next token of each sequence, x [B, width] -> [B, width]; the state changes in place. Has no gradient."""
        check_no_gradient(self, x)
        self.check_state(state, len(x))
        mixed = self.qkv(x)
        if self.conv is not None:
            mixed = self.conv.step(mixed, state.conv)  # pyright: ignore[reportArgumentType]
        args, options = self._arguments(*self._heads_of(mixed), x)
        return self._result(self.ops[1](*args, self._memory(state), backend=self.backend, **options), x)

    def init_state(self, batch: int, *, device: Any = None, dtype: Any = None) -> RecurrentState:
        """The state of `batch` sequences before their first token: zeros.

        dtype: of the tokens, the parameters' when None; what is summed up is in fp32, or in float64 with them.
        """
        device = self.out.weight.device if device is None else device
        dtype = self.out.weight.dtype if dtype is None else dtype
        dtypes = {"kv": calls.wide(dtype), "z": calls.wide(dtype), "conv": dtype}
        made = {
            name: None if shape is None else torch.zeros(shape, device=device, dtype=dtypes[name])
            for name, shape in self._shapes(batch).items()
        }
        return RecurrentState(**made)  # pyright: ignore[reportArgumentType]

    def check_state(self, state: Any, batch: int) -> None:
        """Raise TypeError or ValueError unless `state` is one of this layer for `batch` sequences."""
        check_kind(type(self).__name__, state, RecurrentState)
        check_shapes(type(self).__name__, state, self._shapes(batch))

    def _shapes(self, batch: int) -> dict[str, tuple[int, ...] | None]:
        conv = None if self.conv is None else (batch, self.conv.size - 1, self.conv.channels)
        z = (batch, self.heads, self.key_dim) if self.normalizes else None
        return {"kv": (batch, self.value_heads, self.key_dim, self.value_dim), "z": z, "conv": conv}

    def _memory(self, state: RecurrentState) -> Any:
        return (state.kv, state.z) if self.normalizes else state.kv

    def _heads_of(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [..., heads, key_dim] and v [..., value_heads, value_dim], views of one row."""
        keys = self.heads * self.key_dim
        q, k, v = mixed.split([keys, keys, self.value_heads * self.value_dim], -1)
        by_head = (self.heads, self.key_dim)
        return q.unflatten(-1, by_head), k.unflatten(-1, by_head), v.unflatten(-1, (self.value_heads, self.value_dim))

    def _arguments(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> Arguments:
        """What the ops are called with: tensors in order, and options."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its ops are called with")

    def _result(self, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """o [..., value_heads, value_dim] -> [..., width]"""
        if self.norm is not None:
            o = self.norm(o).to(o.dtype)
        o = o.flatten(-2)
        if self.gate is not None:
            o = o * F.silu(self.gate(x))
        return self.out(o)


class LinearAttention(RecurrentLayer):
    """Attention as the article has it: a feature map, a normaliser, nothing else.

        S_t = S_{t-1} + phi(k_t) v_t^T        z_t = z_{t-1} + phi(k_t)
        o_t = phi(q_t)^T S_t / (phi(q_t) . z_t + eps)

    Args: as RecurrentLayer, and
        feature_map: phi, as in linattn_tl.linear_attention.
        normalize, eps: likewise.
        conv_silu: False, for phi comes after it: of silu, which is no less than -0.28, elu + 1 is at least 0.75.

    Source: Katharopoulos et al. 2020, arXiv 2006.16236, eq. 16-20.
    """

    ops = (linear_attention, linear_attention_decode)
    normalizes = True

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        feature_map: Any = "elu1",
        normalize: bool = True,
        eps: float = 1e-6,
        conv_silu: bool = False,
        **sizes: Any,
    ):
        super().__init__(width, heads, conv_silu=conv_silu, **sizes)
        self.options = {"feature_map": feature_map, "normalize": normalize, "eps": eps}

    def _arguments(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> Arguments:
        return (q, k, v), self.options


class Retention(RecurrentLayer):
    """RetNet's layer, without its rotation of q and k: each head forgets at a fixed rate.

        S_t = gamma_h S_{t-1} + k_t v_t^T        o_t = K^-1/2 q_t^T S_t        gamma_h = 1 - 2^(-5 - h)

    Each head is normalised, then gated. Args: as RecurrentLayer.

    Source: Sun et al. 2023, arXiv 2307.08621, eq. 6-8.
    """

    ops = (retention, retention_decode)

    def __init__(self, width: int, heads: int, *, gate: bool = True, norm: bool = True, **sizes: Any):
        super().__init__(width, heads, gate=gate, norm=norm, **sizes)

    def _arguments(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> Arguments:
        return (q, k, v), {}


class SimpleGLA(RecurrentLayer):
    """Gated linear attention with one decay a head and token, which depends on the token.

        S_t = a_t S_{t-1} + k_t v_t^T        o_t = K^-1/2 q_t^T S_t        a_t = sigmoid(w x_t)^(1 / gate_scale)

    Each head is normalised, then gated.

    Args: as RecurrentLayer, and
        gate_scale: 16 keeps decays near 1 at first, so that the memory is long.

    Source: Yang et al. 2023, arXiv 2312.06635, section 4.4, with a number for each head's decay in place of a
    vector, from one projection, and with a short convolution.
    """

    ops = (simple_gla, simple_gla_decode)
    controls_per_head = 1

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        gate_scale: float = 16.0,
        conv_size: int = 4,
        gate: bool = True,
        norm: bool = True,
        **sizes: Any,
    ):
        super().__init__(width, heads, conv_size=conv_size, gate=gate, norm=norm, **sizes)
        self.gate_scale = gate_scale

    def _arguments(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> Arguments:
        return (q, k, v, F.logsigmoid(self.controls(x).float()) / self.gate_scale), {}  # pyright: ignore


class DeltaNet(RecurrentLayer):
    """The delta rule: what a key stands for is replaced, not added to.

        u_t = beta_t (v_t - S_{t-1}^T k_t)        S_t = S_{t-1} + k_t u_t^T        o_t = K^-1/2 q_t^T S_t

    q and k have length 1, beta = sigmoid(w x). Each head is normalised.

    Args: as RecurrentLayer, and
        allow_neg_eigval: beta up to 2.

    Source: Yang et al. 2024, arXiv 2406.06484, eq. 3-4 and section 3.3.
    """

    ops = (delta_rule, delta_rule_decode)
    controls_per_head = 1

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        norm: bool = True,
        **sizes: Any,
    ):
        super().__init__(width, heads, conv_size=conv_size, norm=norm, **sizes)
        self.options = {"qk_l2norm": True, "beta_is_logit": True, "allow_neg_eigval": allow_neg_eigval}

    def _arguments(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> Arguments:
        return (q, k, v, self.controls(x)), self.options  # pyright: ignore[reportOptionalCall]


class GatedDeltaNet(RecurrentLayer):
    """The delta rule on a state that decays, as in Qwen3-Next and Qwen3.5.

        u_t = beta_t (v_t - a_t S_{t-1}^T k_t)        S_t = a_t S_{t-1} + k_t u_t^T        o_t = K^-1/2 q_t^T S_t
        a_t = exp(-exp(A_log) softplus(w x_t + dt_bias))

    q and k have length 1, beta = sigmoid(w' x). Each head is normalised, then gated.

    Args: as DeltaNet.

    Source: Yang et al. 2024, arXiv 2412.06464, eq. 10 and section 3.4.
    """

    ops = (gated_delta_rule, gated_delta_rule_decode)
    controls_per_head = 2

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        gate: bool = True,
        norm: bool = True,
        **sizes: Any,
    ):
        super().__init__(width, heads, conv_size=conv_size, gate=gate, norm=norm, **sizes)
        self.options = {"qk_l2norm": True, "beta_is_logit": True, "allow_neg_eigval": allow_neg_eigval}
        self.A_log, self.dt_bias = decay_parameters(self.value_heads, sizes.get("device"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_decay(self.A_log, self.dt_bias)

    def _arguments(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> Arguments:
        g, beta = self.controls(x).chunk(2, -1)  # pyright: ignore[reportOptionalCall]
        return (q, k, v, g, beta), {**self.options, "A_log": self.A_log, "dt_bias": self.dt_bias}


class Mamba2(RecurrentLayer):
    """Mamba-2: a state space model with one decay a head and token. Here heads are its groups of B and C.

        h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T        y_t = C_t^T h_t + D x_t        dt = softplus(w u + dt_bias)

    The result is gated, then normalised over all channels.

    Args: as RecurrentLayer, without gate and norm, and in other words than the paper's:
        heads: groups; 1 in most models, here also the default of value_heads, its heads.
        key_dim: d_state. value_dim: head dim. Together value_heads * value_dim is 2 width there.

    Source: Dao and Gu 2024, arXiv 2405.21060, section 7.
    """

    ops = (ssd, ssd_decode)
    controls_per_head = 1

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        conv_size: int = 4,
        conv_bias: bool = True,
        norm_eps: float = 1e-6,
        **sizes: Any,
    ):
        if "gate" in sizes or "norm" in sizes:
            raise TypeError("Mamba2: gate or norm is given; expected neither, for both are part of the layer")
        super().__init__(width, heads, conv_size=conv_size, conv_bias=conv_bias, gate=True, **sizes)
        made = {"device": sizes.get("device"), "dtype": sizes.get("dtype")}
        self.norm = RMSNorm(self.value_heads * self.value_dim, eps=norm_eps, **made)  # pyright: ignore[reportArgumentType]
        self.D = nn.Parameter(torch.empty(self.value_heads, **made))
        self.A_log, self.dt_bias = decay_parameters(self.value_heads, sizes.get("device"))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.D)
        reset_decay(self.A_log, self.dt_bias)

    def _arguments(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> Arguments:
        dt = self.controls(x)  # pyright: ignore[reportOptionalCall]
        return (v, dt, -self.A_log.exp(), k, q), {"D": self.D, "dt_bias": self.dt_bias, "dt_softplus": True}

    def _result(self, o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(o.flatten(-2) * F.silu(self.gate(x))))  # pyright: ignore[reportOptionalCall]


def decay_parameters(heads: int, device: Any = None) -> tuple[nn.Parameter, nn.Parameter]:
    """A_log and dt_bias [heads], made in fp32, without values yet."""
    made = {"device": device, "dtype": torch.float32}
    return nn.Parameter(torch.empty(heads, **made)), nn.Parameter(torch.empty(heads, **made))


@torch.no_grad()
def reset_decay(A_log: torch.Tensor, dt_bias: torch.Tensor) -> None:
    """A = exp(A_log) from 1 to 16, and softplus(dt_bias) from 0.001 to 0.1, both at random.

    Source: Gu and Dao 2023, arXiv 2312.00752, section 3.6, and Dao and Gu 2024, arXiv 2405.21060.
    """
    A_log.uniform_(1, 16).log_()
    dt = dt_bias.uniform_(math.log(1e-3), math.log(1e-1)).exp()
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
