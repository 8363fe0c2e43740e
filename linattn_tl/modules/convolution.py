"""The short causal convolution before a recurrence, over whole, packed and growing sequences."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from linattn_tl.modules.packing import owners_of


class ShortConvolution(nn.Module):
    """Depthwise and causal: each channel sees its own last `size` tokens. Then SiLU, unless silu is False.

        y_t = silu(b + sum_j w_j x_{t - size + 1 + j}),  j = 0 ... size - 1;  what is before the first token is 0

    Its state is the last size - 1 tokens, [N, size - 1, channels].

    Source: Dao and Gu 2024, arXiv 2405.21060, section 7; used alike by arXiv 2406.06484 and 2412.06464.
    """

    def __init__(
        self,
        channels: int,
        size: int = 4,
        *,
        bias: bool = False,
        silu: bool = True,
        device: object = None,
        dtype: object = None,
    ):
        super().__init__()
        if size < 2:
            raise ValueError(f"ShortConvolution: size is {size}; expected at least 2 tokens")
        self.channels, self.size, self.silu = channels, size, silu
        self.weight = nn.Parameter(torch.empty(channels, size, device=device, dtype=dtype))  # pyright: ignore
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None  # pyright: ignore
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -(self.size**-0.5), self.size**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: torch.Tensor, state: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, T, channels] -> y like x, and the last size - 1 tokens of each sequence, those of `state` included."""
        if cu_seqlens is not None:
            return self._packed(x, state, cu_seqlens)
        before = x.new_zeros(x.shape[0], self.size - 1, self.channels) if state is None else state.to(x.dtype)
        extended = torch.cat([before, x], 1)
        return self._convolve(extended), extended[:, x.shape[1] :]

    def _packed(
        self, x: torch.Tensor, state: torch.Tensor | None, cu_seqlens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As forward, with room for size - 1 tokens before each sequence."""
        room, N = self.size - 1, len(cu_seqlens) - 1
        numbers = torch.arange(N, device=x.device)
        tokens = torch.arange(x.shape[1], device=x.device) + owners_of(x.shape[1], cu_seqlens, numbers + 1) * room
        extended = x.new_zeros(1, x.shape[1] + N * room, self.channels).index_copy(1, tokens, x)
        inside = torch.arange(room, device=x.device)
        if state is not None:
            starts = cu_seqlens[:-1] + numbers * room
            rows = (starts.unsqueeze(1) + inside).flatten()
            extended = extended.index_copy(1, rows, state.to(x.dtype).reshape(1, N * room, self.channels))
        y = self._convolve(extended).index_select(1, tokens - room)
        return y, extended[0, (cu_seqlens[1:] + numbers * room).unsqueeze(1) + inside]

    def _convolve(self, extended: torch.Tensor) -> torch.Tensor:
        """[B, T + size - 1, channels] -> [B, T, channels]"""
        if extended.shape[1] < self.size:  # no tokens
            return extended[:, :0]
        # the dtype of what comes out of a projection, under autocast too
        weight, bias = (None if x is None else x.to(extended.dtype) for x in (self.weight, self.bias))
        convolved = _of_shifts if torch.compiler.is_compiling() else _Depthwise.apply
        return self._activated(convolved(extended, weight, bias))  # pyright: ignore[reportArgumentType]

    def _activated(self, y: torch.Tensor) -> torch.Tensor:
        return F.silu(y) if self.silu else y

    def step(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """One token of each sequence, x [B, channels]; the state [B, size - 1, channels] moves on in place."""
        window = torch.cat([state, x.unsqueeze(1).to(state.dtype)], 1)
        state.copy_(window[:, 1:])
        y = (window * self.weight.mT).sum(1)
        return self._activated(y if self.bias is None else y + self.bias).to(x.dtype)


def depthwise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y_t = b + sum_j w_j x_{t + j}: [B, T + size - 1, channels] -> [B, T, channels]

    As an image of height 1 whose channels come last, which is how x lies: conv1d would copy it to and fro.
    """
    y = F.conv2d(_image(x), weight[:, None, None], bias, groups=len(weight))
    return y.permute(0, 2, 3, 1).squeeze(1)


def _of_shifts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same for a compiler, which makes one pass of it; a convolution it would compile anew for every length."""
    size = weight.shape[1]
    T = x.shape[1] - size + 1
    y = sum(x[:, j : j + T] * weight[:, j] for j in range(size))
    return y if bias is None else y + bias  # pyright: ignore[reportReturnType]


def _image(x: torch.Tensor) -> torch.Tensor:
    """[B, T, channels] -> [B, channels, 1, T], a view."""
    return x.unsqueeze(1).permute(0, 3, 1, 2)


class _Depthwise(torch.autograd.Function):
    """depthwise, with a gradient by the weights that is a sum of products: on a CPU in bfloat16 torch's own takes most
    of the time. Differentiable again, for it is made of torch's functions.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return depthwise(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dweight, dbias = None, None, None
        if ctx.needs_input_grad[0]:
            plain = [1, 1], [0, 0], [1, 1], False, [0, 0], len(weight), [True, False, False]
            dx = torch.ops.aten.convolution_backward(_image(dy), _image(x), weight[:, None, None], None, *plain)[0]
            dx = dx.permute(0, 2, 3, 1).squeeze(1)
        if ctx.needs_input_grad[1]:
            T = dy.shape[1]
            dweight = torch.stack([(dy * x[:, j : j + T]).sum((0, 1)) for j in range(weight.shape[1])], 1)
        if ctx.needs_input_grad[2]:
            dbias = dy.sum((0, 1))
        return dx, dweight, dbias
