"""Modules named, called and answering as those of pytorch-fast-transformers ("Transformers are RNNs"), on our ops.

    from linattn_tl.compat.fast_transformers import CausalLinearAttention, LengthMask, TriangularCausalMask

Arguments, their order, defaults, layouts and results are those of fast_transformers 0.4: tokens [N, L, H, E], a feature
map made by a factory from query_dimensions, masks, the recurrent state as a list [S, Z]. That library need not be
installed: its masks serve, ours of the same names, and any object with the attributes that are read (`all_ones`,
`lower_triangular`, `float_matrix`). None, which is the default here, masks nothing beyond what the module itself does.

Where the feature map is elu(x) + 1 and no key is masked, the kernel applies it; otherwise it is applied beforehand.
Differences: any dtype and device is served; states that come out are fp32, float64 for float64 tokens; where there are
more queries than keys, causal attention takes the missing values as zeros, like the keys. query_lengths and
event_dispatcher are taken and have no effect: these modules do not look at the former, and send no events, there
either. What has no counterpart (other attention masks, heads of k and v that differ in number, a feature map that is
not a factory) is refused by name, and an unknown keyword by Python.
"""

import warnings
from collections.abc import Callable
from functools import reduce
from typing import Any, cast

import torch
from torch import nn

from linattn_tl import apply, shapes
from linattn_tl.ops.linear_attention import LinearState, linear_attention, linear_attention_decode
from linattn_tl.ops.linear_attention.definition import FEATURE_MAPS

__all__ = [
    "CausalLinearAttention",
    "FullMask",
    "LengthMask",
    "LinearAttention",
    "RecurrentCrossLinearAttention",
    "RecurrentLinearAttention",
    "TriangularCausalMask",
    "causal_dot_product",
    "elu_feature_map",
]

Tensor = torch.Tensor
Factory = Callable[[int], Any]
MAP_METHODS = ("new_feature_map", "forward_queries", "forward_keys")
USER = 4  # frames from a module's forward to who called the module: torch has two between


def causal_dot_product(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """Sums of values, each weighed by the products of its key with the query, over the tokens up to the query's.

        S_t = S_{t-1} + K_t V_t^T        o_t = Q_t^T S_t

    Args:
        Q, K: [N, H, L, E], through a feature map if there is one.
        V: [N, H, L, M].

    Returns:
        o [N, H, L, M], contiguous. Differentiable in all three.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device; the text names it.

    Source: Katharopoulos et al. 2020, arXiv 2006.16236, the numerator of eq. 9 and 12.
    """
    shapes.check_tensors("causal_dot_product", Q=Q, K=K, V=V)
    shapes.bind_shapes("causal_dot_product", Q=(Q, "N H L E"), K=(K, "N H L E"), V=(V, "N H L M"))
    q, k, v = (x.transpose(1, 2) for x in (Q, K, V))
    o, _ = linear_attention(q, k, v, feature_map="identity", normalize=False)
    return o.transpose(1, 2).contiguous()


# ---- feature maps


class EluFeatureMap(nn.Module):
    """phi(x) = elu(x) + 1 (eq. 7), and the methods that a feature map has there."""

    def __init__(self, query_dims: int):
        super().__init__()
        self.query_dims = query_dims

    def new_feature_map(self, device: Any) -> None:
        """What a random feature map would draw anew."""

    def forward_queries(self, x: Tensor) -> Tensor:
        return self(x)

    def forward_keys(self, x: Tensor) -> Tensor:
        return self(x)

    def forward(self, x: Tensor) -> Tensor:
        return FEATURE_MAPS["elu1"](x)


def elu_feature_map(query_dims: int) -> EluFeatureMap:
    """The factory of the default feature map, the one that kernels have in them."""
    return EluFeatureMap(query_dims)


def _made(op: str, factory: Any, query_dimensions: int) -> Any:
    expected = f"expected None or a callable that makes an object with {', '.join(MAP_METHODS)} of query_dimensions"
    if not callable(factory):
        raise TypeError(f"{op}: feature_map is {type(factory).__name__}; {expected}")
    made = factory(query_dimensions)
    for name in MAP_METHODS:
        if not callable(getattr(made, name, None)):
            raise TypeError(f"{op}: feature_map made {type(made).__name__}, which has no {name}; {expected}")
    return made


def _checked_map(op: str, name: str, x: Tensor, y: Any) -> Tensor:
    """y, what a feature map made of x."""
    if not isinstance(y, torch.Tensor):
        raise TypeError(f"{op}: feature_map made {type(y).__name__} of {name}; expected a tensor")
    if y.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"{op}: feature_map made {tuple(y.shape)} of {name} {tuple(x.shape)}; expected the same but for the last "
            "size"
        )
    return y


# ---- masks


class _Mask:
    """True where attention is allowed. What modules ask of it is known once it is made; the matrices are not kept."""

    all_ones: bool
    lower_triangular: bool
    bool_matrix: Any  # [rows, columns]

    @property
    def shape(self) -> torch.Size:
        return self.bool_matrix.shape

    @property
    def float_matrix(self) -> Tensor:
        return self.bool_matrix.float()

    @property
    def lengths(self) -> Tensor:
        """How many are allowed in each row [rows]; ValueError where those are not the first ones."""
        counts = self.bool_matrix.sum(-1)
        if not self.bool_matrix.equal(_first(counts, self.shape[-1])):
            raise ValueError(f"{type(self).__name__}: lengths of a mask with gaps; expected True before False in a row")
        return counts


class FullMask(_Mask):
    """Any mask: FullMask(bool tensor [rows, columns]), or FullMask(N) and FullMask(N, M) of ones."""

    def __init__(self, mask: Any = None, N: int | None = None, M: int | None = None, device: Any = "cpu"):
        if isinstance(mask, torch.Tensor):
            if mask.dtype != torch.bool:
                raise ValueError(f"FullMask: mask has dtype {mask.dtype}; expected torch.bool")
            self.bool_matrix = mask.clone()
            self.all_ones = bool(mask.all())
            self.lower_triangular = mask.equal(torch.ones_like(mask).tril())
            return
        if isinstance(mask, int) and M is None:
            N, M = mask, N
        if N is None:
            raise ValueError(f"FullMask: mask is {mask!r} and N is None; expected a bool tensor or sizes")
        columns = N if M is None else M
        # one element: [L, L] of them would be the largest tensor of a model without softmax
        self.bool_matrix = torch.ones((), dtype=torch.bool, device=device).expand(N, columns)
        self.all_ones, self.lower_triangular = True, columns == 1


class LengthMask(_Mask):
    """The first lengths[i] of max_len in row i; max_len is that of the longest when None."""

    def __init__(self, lengths: Tensor, max_len: int | None = None, device: Any = None):
        self._lengths = lengths.clone() if device is None else lengths.to(device, copy=True)
        self._columns = int(lengths.max()) if max_len is None else max_len
        self.all_ones = bool((lengths >= self._columns).all())
        self.lower_triangular = lengths.tolist() == list(range(1, len(lengths) + 1))

    @property
    def bool_matrix(self) -> Tensor:
        return _first(self._lengths, self._columns)

    @property
    def lengths(self) -> Tensor:
        return self._lengths


class TriangularCausalMask(LengthMask):
    """What is not above the diagonal of [N, N]."""

    def __init__(self, N: int, device: Any = "cpu"):
        super().__init__(torch.arange(1, N + 1), N, device)


def _first(lengths: Tensor, columns: int) -> Tensor:
    return torch.arange(columns, device=lengths.device) < lengths[:, None]


def _check_mask(op: str, attn_mask: Any, kind: str) -> None:
    """kind: the attribute that says of a mask that it is the one which the module applies anyway."""
    if attn_mask is None:
        return
    holds = getattr(attn_mask, kind, None)
    if holds is None:
        raise TypeError(f"{op}: attn_mask is {type(attn_mask).__name__}; expected None or a mask with {kind}")
    if not holds:
        raise RuntimeError(f"{op}: attn_mask has {kind} = False; expected a mask where it is True, or None")


def _weights(op: str, key_lengths: Any, keys: Tensor) -> Tensor | None:
    """What each key is multiplied by, [N or 1, S]; None where that is 1."""
    if key_lengths is None:
        return None
    N, S = keys.shape[:2]
    weights = getattr(key_lengths, "float_matrix", None)
    if not isinstance(weights, torch.Tensor):
        raise TypeError(f"{op}: key_lengths is {type(key_lengths).__name__}; expected None or a mask with float_matrix")
    if tuple(weights.shape) not in ((N, S), (1, S)):
        raise ValueError(f"{op}: key_lengths has shape {tuple(weights.shape)}; expected [N, S] = {(N, S)} (from keys)")
    if getattr(key_lengths, "all_ones", False):
        return None
    shapes.check_device(op, "keys", keys.device, key_lengths=weights)
    return weights


# ---- modules


class _Attention(nn.Module):
    """What the modules share: the arguments they are made of, and the feature map."""

    feature_map: Any

    def __init__(
        self, query_dimensions: int, feature_map: Factory | None = None, eps: float = 1e-6, event_dispatcher: Any = ""
    ):
        super().__init__()
        op = type(self).__name__
        if not isinstance(query_dimensions, int):
            raise TypeError(f"{op}: query_dimensions is {type(query_dimensions).__name__}; expected an int")
        if not isinstance(eps, int | float):
            raise TypeError(f"{op}: eps is {type(eps).__name__}; expected a number")
        self.feature_map = _made(op, elu_feature_map if feature_map is None else feature_map, query_dimensions)
        self.eps = eps
        self.event_dispatcher = event_dispatcher

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def _fused(self) -> bool:
        """Whether kernels have the feature map. A class derived from ours may do something else."""
        return type(self.feature_map) is EluFeatureMap

    def _queries(self, name: str, x: Tensor) -> Tensor:
        return _checked_map(self._name, name, x, self.feature_map.forward_queries(x))

    def _keys(self, name: str, x: Tensor, weights: Tensor | None = None) -> Tensor:
        k = _checked_map(self._name, name, x, self.feature_map.forward_keys(x))
        return k if weights is None else k * weights[:, :, None, None].to(k.dtype)

    def _whole(self, queries: Any, keys: Any, values: Any, key_lengths: Any, causal: bool) -> Tensor:
        """Whole sequences, [N, L, H, M]."""
        shapes.check_tensors(self._name, queries=queries, keys=keys, values=values)
        shapes.bind_shapes(
            self._name, queries=(queries, "N L H E"), keys=(keys, "N S H E"), values=(values, "N S H M")
        )  # fmt: skip
        L, S = queries.shape[1], keys.shape[1]
        weights = _weights(self._name, key_lengths, keys)
        self.feature_map.new_feature_map(queries.device)
        # keys that a causal pass wants for queries beyond the last are zeros behind the feature map
        phi = "elu1" if self._fused and weights is None and not (causal and L > S) else "identity"
        q, k, v = queries, keys, values
        if phi == "identity":
            q, k = self._queries("queries", q), self._keys("keys", k, weights)
        if causal:
            k, v = _of_length(k, L), _of_length(v, L)
        o, _ = linear_attention(q, k, v, feature_map=phi, causal=causal, eps=self.eps)
        return o.contiguous()


class LinearAttention(_Attention):
    """Every query attends to every key that is not masked.

        o_i = phi(q_i)^T sum_j w_j phi(k_j) v_j^T / (phi(q_i) . sum_j w_j phi(k_j) + eps)

    w_j is 1, or 0 for a masked key.

    Args:
        query_dimensions: E, which the factory of the feature map is given.
        feature_map: None for elu(x) + 1, or a factory: called with query_dimensions it makes an object with
            new_feature_map(device), forward_queries(x) and forward_keys(x), which may change the last size.
        eps: added to the normaliser.
        event_dispatcher: of no effect.

    Raises:
        TypeError: an argument is of another type; the text names it.

    Source: Katharopoulos et al. 2020, arXiv 2006.16236, eq. 4-7.
    """

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: Any = None,
        query_lengths: Any = None,
        key_lengths: Any = None,
    ) -> Tensor:
        """queries [N, L, H, E], keys [N, S, H, E], values [N, S, H, M] -> [N, L, H, M], contiguous.

        Args:
            attn_mask: None, or a mask whose all_ones is true.
            query_lengths: of no effect.
            key_lengths: None, or a mask whose float_matrix [N, S] multiplies the keys.

        Raises:
            RuntimeError: attn_mask masks something.
            ValueError, TypeError: an argument has a wrong shape, type, dtype or device; the text names it.
        """
        _check_mask(self._name, attn_mask, "all_ones")
        return self._whole(queries, keys, values, key_lengths, causal=False)


class CausalLinearAttention(_Attention):
    """Query i attends to the keys up to i that are not masked.

        S_i = S_{i-1} + w_i phi(k_i) v_i^T        z_i = z_{i-1} + w_i phi(k_i)
        o_i = phi(q_i)^T S_i / (phi(q_i) . z_i + eps)

    w_i is 1, or 0 for a masked key. Made and refused as LinearAttention.

    Source: Katharopoulos et al. 2020, arXiv 2006.16236, eq. 8-12.
    """

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: Any = None,
        query_lengths: Any = None,
        key_lengths: Any = None,
    ) -> Tensor:
        """queries [N, L, H, E], keys [N, S, H, E], values [N, S, H, M] -> [N, L, H, M], contiguous.

        Of more keys than queries the first L count; behind fewer come zeros.

        Args:
            attn_mask: None, or a mask whose lower_triangular is true.
            query_lengths: of no effect.
            key_lengths: None, or a mask whose float_matrix [N, S] multiplies the keys.

        Raises:
            RuntimeError: attn_mask is another mask.
            ValueError, TypeError: an argument has a wrong shape, type, dtype or device; the text names it.
        """
        _check_mask(self._name, attn_mask, "lower_triangular")
        return self._whole(queries, keys, values, key_lengths, causal=True)


class RecurrentLinearAttention(_Attention):
    """CausalLinearAttention, a token a call.

        S_i = S_{i-1} + phi(k_i) v_i^T    z_i = z_{i-1} + phi(k_i)    o_i = phi(q_i)^T S_i / (phi(q_i) . z_i + eps)

    Made and refused as LinearAttention.

    Source: Katharopoulos et al. 2020, arXiv 2006.16236, eq. 16-20.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, state: Any = None, memory: Any = None
    ) -> tuple[Tensor, list[Tensor]]:
        """query [N, H, E], key [N, H, E], value [N, H, M] -> (o [N, H, M], [S [N, H, D, M], z [N, H, D]]).

        Without gradients the step is in place, as there: the state that comes out is the one that was given, unless its
        dtype has to change. While gradients are recorded for a token or the state, or the state carries some, it is a
        new one, and gradients flow through it.

        Args:
            state: [S, z] of the step before; None at the first token, when the feature map is also drawn anew. D is
                what the feature map makes of E.
            memory: deprecated, the same as state, which comes first.

        Raises:
            ValueError, TypeError: an argument has a wrong shape, type, dtype or device, the batch of the state too; the
                text names it.
        """
        op = self._name
        if memory is not None:
            warnings.warn(f"{op}: memory is deprecated; expected state", DeprecationWarning, stacklevel=USER)
        state = memory if state is None else state
        shapes.check_tensors(op, query=query, key=key, value=value)
        shapes.bind_shapes(op, query=(query, "N H E"), key=(key, "N H E"), value=(value, "N H M"))
        if state is None:
            self.feature_map.new_feature_map(query.device)
        phi, q, k = "elu1", query, key
        if not self._fused:
            phi, q, k = "identity", self._queries("query", query), self._keys("key", key)
        S, z = _zeros(q, value) if state is None else _state_in(op, state, q, "N H D M", value=(value, "N H M"))
        if _in_place((q, k, value), (S, z)):
            return linear_attention_decode(q, k, value, (S, z), feature_map=phi, eps=self.eps), [S, z]
        q, k, v = (x.unsqueeze(1) for x in (q, k, value))
        o, last = _with_state(q, k, v, feature_map=phi, eps=self.eps, initial_state=(S, z))
        return o.squeeze(1), list(last)


class RecurrentCrossLinearAttention(_Attention):
    """LinearAttention, a query a call: the keys and values are summed by the first one.

        S = sum_j v_j (w_j phi(k_j))^T        z = sum_j w_j phi(k_j)        o = S phi(q) / (phi(q) . z + eps)

    w_j is 1, or 0 for a masked key. S is the transpose of RecurrentLinearAttention's, as there. Made and refused as
    LinearAttention.

    Source: Katharopoulos et al. 2020, arXiv 2006.16236, eq. 4-7.
    """

    def forward(
        self, query: Tensor, keys: Any, values: Any, key_lengths: Any = None, state: Any = None
    ) -> tuple[Tensor, list[Tensor]]:
        """query [N, H, E], keys [N, S, H, E], values [N, S, H, M] -> (o [N, H, M], [S [N, H, M, D], z [N, H, D]]).

        Args:
            keys, values, key_lengths: not looked at when there is a state, and may be None then.
            key_lengths: None, or a mask whose float_matrix [N, S] multiplies the keys.
            state: what the first call returned; None at the first, when the feature map is also drawn anew.

        Raises:
            ValueError, TypeError: an argument has a wrong shape, type, dtype or device, the batch of the state too; the
                text names it.
        """
        op = self._name
        shapes.check_tensors(op, query=query)
        if state is None:
            return self._summed(query, keys, values, key_lengths)
        phi, q = ("elu1", query) if self._fused else ("identity", self._queries("query", query))
        S, z = _state_in(op, state, q, "N H M D")
        (N, H, D), M = q.shape, S.shape[2]
        # no further keys: the sums are what the state holds
        k, v = q.new_empty(N, 0, H, D), q.new_empty(N, 0, H, M)
        o, _ = linear_attention(
            q.unsqueeze(1), k, v, feature_map=phi, causal=False, eps=self.eps, initial_state=(S.mT, z)
        )
        return o.squeeze(1), list(state)

    def _summed(self, query: Tensor, keys: Any, values: Any, key_lengths: Any) -> tuple[Tensor, list[Tensor]]:
        op = self._name
        shapes.check_tensors(op, keys=keys, values=values)
        shapes.bind_shapes(op, query=(query, "N H E"), keys=(keys, "N S H E"), values=(values, "N S H M"))
        weights = _weights(op, key_lengths, keys)
        self.feature_map.new_feature_map(query.device)
        phi, q, k = "elu1", query, keys
        if not self._fused or weights is not None:
            phi, q, k = "identity", self._queries("query", query), self._keys("keys", keys, weights)
        o, (S, z) = _with_state(q.unsqueeze(1), k, values, feature_map=phi, causal=False, eps=self.eps)
        # a view: what the next call transposes back lies as kernels read it
        return o.squeeze(1), [S.mT, z]


# ---- states and sizes


def _of_length(x: Tensor, L: int) -> Tensor:
    """[N, S, H, D] -> [N, L, H, D]: cut, or with zeros behind."""
    S = x.shape[1]
    return x[:, :L] if L <= S else nn.functional.pad(x, (0, 0, 0, 0, 0, L - S))


def _with_state(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, LinearState]:
    return cast(tuple[Tensor, LinearState], linear_attention(q, k, v, output_final_state=True, **options))


def _wide(*given: Tensor) -> torch.dtype:
    """The dtype of a state beside these tokens."""
    return reduce(torch.promote_types, (x.dtype for x in given), torch.float32)


def _zeros(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    z = q.new_zeros(q.shape, dtype=_wide(q, v))
    return z.new_zeros(*q.shape, v.shape[-1]), z


def _state_in(op: str, state: Any, q: Tensor, letters: str, **value: tuple[Tensor, str]) -> tuple[Tensor, Tensor]:
    """(S, z) of a state, S as letters say, of any dtype there and wide here."""
    if not isinstance(state, list | tuple) or len(state) != 2:
        raise TypeError(f"{op}: state is {type(state).__name__}; expected None or a pair [S, z]")
    S, z = state
    parts = {"state[0]": S, "state[1]": z}
    shapes.check_tensors(op, **parts)
    given = {"feature_map(query)": (q, "N H D"), **value}
    shapes.bind_shapes(op, **given, **{"state[0]": (S, letters), "state[1]": (z, "N H D")})
    shapes.check_device(op, "query", q.device, **parts)
    dtype = _wide(q, *(x for x, _ in value.values()))
    return S.to(dtype), z.to(dtype)


def _in_place(tokens: tuple[Tensor, ...], state: tuple[Tensor, Tensor]) -> bool:
    """Whether a step may write to the state: no derivative of it is wanted, and no graph holds it."""
    if any(x.requires_grad for x in state):
        return False
    if apply.transformed():
        return False
    return not torch.is_grad_enabled() or not any(x.requires_grad for x in tokens)
