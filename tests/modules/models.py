"""Layers and models under test, and their truth: the same parameters in float64, a token at a time."""

import copy
from typing import Any

import torch
from torch import nn

from linattn_tl.modules import (
    CausalLM,
    DeltaNet,
    GatedDeltaNet,
    LinearAttention,
    Mamba2,
    Retention,
    SimpleGLA,
    SoftmaxAttention,
)

WIDTH, HEADS = 32, 2
GROUPED: dict[str, Any] = {"value_heads": 4, "key_dim": 16, "value_dim": 8}  # K != V, and two value heads a q/k head
LAYERS = {
    "linear": lambda **made: LinearAttention(WIDTH, HEADS, **made),
    "linear, all options": lambda **made: LinearAttention(
        WIDTH, HEADS, conv_size=3, gate=True, norm=True, **GROUPED, **made
    ),
    "linear, relu, no normaliser": lambda **made: LinearAttention(
        WIDTH, HEADS, feature_map="relu", normalize=False, **made
    ),
    "retention": lambda **made: Retention(WIDTH, HEADS, **GROUPED, **made),
    "simple gla": lambda **made: SimpleGLA(WIDTH, HEADS, **made),
    "mamba2": lambda **made: Mamba2(WIDTH, 1, value_heads=4, key_dim=16, value_dim=16, **made),
    "delta": lambda **made: DeltaNet(WIDTH, HEADS, **GROUPED, **made),
    "delta, negative eigenvalues": lambda **made: DeltaNet(WIDTH, HEADS, allow_neg_eigval=True, conv_size=0, **made),
    "gated delta": lambda **made: GatedDeltaNet(WIDTH, HEADS, **GROUPED, **made),
    "softmax": lambda **made: SoftmaxAttention(WIDTH, HEADS, **made),
    "softmax, grouped, no positions": lambda **made: SoftmaxAttention(WIDTH, 4, kv_heads=2, rope_base=None, **made),
}
PATTERNS = ("L", "R", "G", "M", "D", "N", "S", "LLLS", "NNNS")


def layer_of(name: str, **made: Any) -> nn.Module:
    torch.manual_seed(0)
    return LAYERS[name](**made)


def model_of(pattern: str, **options: Any) -> CausalLM:
    torch.manual_seed(0)
    layers = 2 if len(pattern) == 1 else None
    return CausalLM(50, WIDTH, HEADS, pattern, layers, options={"L": {"conv_size": 4}}, **options)


def stepped(layer: nn.Module, x: torch.Tensor, state: Any = None) -> torch.Tensor:
    """layer.step over x [B, T, ...], from the state of no tokens."""
    with torch.no_grad():
        state = layer.init_state(len(x)) if state is None else state
        return torch.stack([layer.step(x[:, t], state) for t in range(x.shape[1])], 1)


def truth(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What the recurrence gives in float64, token by token."""
    exact = copy.deepcopy(layer).double()
    return stepped(exact, x.double() if x.is_floating_point() else x)


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative RMS."""
    return ((actual.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30)).item()
