"""Pre-norm blocks, and stacks of them in any pattern of linear and softmax layers."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from linattn_tl.modules.norms import RMSNorm
from linattn_tl.modules.packing import SequenceModule, sequences_of
from linattn_tl.modules.recurrent import DeltaNet, GatedDeltaNet, LinearAttention, Mamba2, Retention, SimpleGLA
from linattn_tl.modules.softmax import SoftmaxAttention
from linattn_tl.modules.states import Cache, LayerState

LAYERS: dict[str, type[nn.Module]] = {
    "L": LinearAttention,
    "R": Retention,
    "G": SimpleGLA,
    "M": Mamba2,
    "D": DeltaNet,
    "N": GatedDeltaNet,
    "S": SoftmaxAttention,
}


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x). Source: Shazeer 2020, arXiv 2002.05202, eq. 6 (SwiGLU)."""

    def __init__(self, width: int, hidden: int, *, device: Any = None, dtype: Any = None):
        super().__init__()
        made = {"bias": False, "device": device, "dtype": dtype}
        self.gate_up = nn.Linear(width, 2 * hidden, **made)
        self.down = nn.Linear(hidden, width, **made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class TransformerBlock(SequenceModule):
    """x + layer(norm(x)), then x + mlp(norm(x)).

    Args:
        layer: one of the layers of this package, or any module with their forward, step, init_state and check_state.
        width: of the tokens.
        mlp_width: of the hidden layer; 8/3 width, rounded up to a multiple of 32, when None; 0 for no MLP.
    """

    def __init__(
        self,
        layer: nn.Module,
        width: int,
        *,
        mlp_width: int | None = None,
        norm_eps: float = 1e-6,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        made = {"device": device, "dtype": dtype}
        hidden = -(-width // 12) * 32 if mlp_width is None else mlp_width
        self.norm = RMSNorm(width, eps=norm_eps, **made)
        self.layer = layer
        self.mlp_norm = RMSNorm(width, eps=norm_eps, **made) if hidden else None
        self.mlp = GatedMLP(width, hidden, **made) if hidden else None

    def _read(
        self, x: torch.Tensor, state: LayerState | None, keep_state: bool, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, LayerState | None]:
        y, state = self.layer(self.norm(x), state, keep_state=keep_state, cu_seqlens=cu_seqlens)
        return self._after(x + y), state

    def step(self, x: torch.Tensor, state: LayerState) -> torch.Tensor:
        """As RecurrentLayer.step."""
        return self._after(x + self.layer.step(self.norm(x), state))  # pyright: ignore[reportCallIssue]

    def init_state(self, batch: int, **options: Any) -> LayerState:
        return self.layer.init_state(batch, **options)  # pyright: ignore[reportCallIssue]

    def _after(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.mlp is None else x + self.mlp(self.mlp_norm(x))  # pyright: ignore[reportOptionalCall]


class HybridStack(SequenceModule):
    """Blocks in a pattern of letters, repeated over the layers: "LLLS" is three linear ones to a softmax one.

        L LinearAttention   R Retention   G SimpleGLA   M Mamba2   D DeltaNet   N GatedDeltaNet   S SoftmaxAttention

    "NNNS" is the 3:1 pattern of Qwen3-Next and Qwen3.5. What layers call a state is a Cache here, of all of them.

    Args:
        width, heads: of every layer.
        pattern: letters; the first layers are first.
        layers: how many; the length of the pattern when None.
        options: keywords of the layers of a letter, {"S": {"kv_heads": 2}}; a letter need not be in the pattern.
        mlp_width, norm_eps: as in TransformerBlock.
        backend: of all ops.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        pattern: str = "LLLS",
        layers: int | None = None,
        *,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        mlp_width: int | None = None,
        norm_eps: float = 1e-6,
        backend: str = "auto",
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        made = {"device": device, "dtype": dtype}
        options = options or {}
        letters = layer_letters(pattern, layers)
        for letter in options:
            check_letter("options", letter)
        made_layers = [LAYERS[x](width, heads, **{"backend": backend, **made, **options.get(x, {})}) for x in letters]
        self.pattern = letters
        self.blocks = nn.ModuleList(
            TransformerBlock(layer, width, mlp_width=mlp_width, norm_eps=norm_eps, **made) for layer in made_layers
        )

    def _read(
        self, x: torch.Tensor, cache: Cache | None, keep_state: bool, cu_seqlens: torch.Tensor | None
    ) -> tuple[torch.Tensor, Cache | None]:
        sequences = sequences_of("HybridStack", x, cu_seqlens)
        if cache is not None:
            self.check_cache(cache, sequences)
        states = []
        for i, block in enumerate(self.blocks):
            state = None if cache is None else cache.layers[i]
            x, state = block(x, state, keep_state=keep_state, cu_seqlens=cu_seqlens)
            states.append(state)
        return x, Cache(states, _lengths_after(x, cache, cu_seqlens)) if keep_state else None

    def step(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        """The next token of each sequence, x [B, width] -> [B, width]; the cache changes in place."""
        self.check_cache(cache, len(x))
        for block, state in zip(self.blocks, cache.layers, strict=True):
            x = block.step(x, state)  # pyright: ignore[reportCallIssue]
        cache.lengths += 1
        return x

    def init_state(self, batch: int, *, room: int = 0, device: Any = None, dtype: Any = None) -> Cache:
        """The cache of `batch` sequences before their first token. room: tokens that softmax layers have space for."""
        made = {"device": device, "dtype": dtype}
        states = [
            block.init_state(batch, **made, **({"room": room} if x == "S" else {}))  # pyright: ignore
            for x, block in zip(self.pattern, self.blocks, strict=True)
        ]
        return Cache(
            states,
            torch.zeros(batch, dtype=torch.int64, device=next(self.parameters()).device if device is None else device),
        )

    def check_cache(self, cache: Any, batch: int) -> None:
        """Raise TypeError or ValueError unless `cache` is one of this stack for `batch` sequences."""
        if not isinstance(cache, Cache):
            raise TypeError(f"HybridStack: cache is {type(cache).__name__}; expected Cache, as init_state makes it")
        if len(cache.layers) != len(self.blocks):
            raise ValueError(f"HybridStack: cache has {len(cache.layers)} layers; expected {len(self.blocks)}")
        if cache.batch != batch:
            raise ValueError(f"HybridStack: cache has {cache.batch} sequences; expected {batch} (from x)")


def layer_letters(pattern: str, layers: int | None) -> str:
    """The letter of each layer."""
    for letter in pattern:
        check_letter("pattern", letter)
    if not pattern:
        raise ValueError(f"HybridStack: pattern is empty; expected letters of {''.join(LAYERS)}")
    layers = len(pattern) if layers is None else layers
    if layers < 1:
        raise ValueError(f"HybridStack: layers is {layers}; expected at least 1")
    return (pattern * -(-layers // len(pattern)))[:layers]


def check_letter(argument: str, letter: str) -> None:
    if letter not in LAYERS:
        known = ", ".join(f"{x} ({layer.__name__})" for x, layer in LAYERS.items())
        raise ValueError(f"HybridStack: {argument} has {letter!r}; expected {known}")


def _lengths_after(x: torch.Tensor, cache: Cache | None, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """Tokens that each sequence has read, with those of x."""
    if cu_seqlens is None:
        lengths = torch.full((len(x),), x.shape[1], dtype=torch.int64, device=x.device)
    else:
        lengths = cu_seqlens.diff().long()
    return lengths if cache is None else lengths + cache.lengths
