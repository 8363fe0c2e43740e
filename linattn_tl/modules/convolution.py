"""The short causal convolution before a recurrence, over whole, packed and growing sequences."""

import torch
import torch.nn.functional as F
from torch import nn

from linattn_tl.modules.packing import owners_of


class ShortConvolution(nn.Module):
    """Depthwise and causal, then SiLU: each channel sees its own last `size` tokens.

        y_t = silu(b + sum_j w_j x_{t - size + 1 + j}),  j = 0 ... size - 1;  what is before the first token is 0

    Its state is the last size - 1 tokens, [N, size - 1, channels].

    Source: Dao and Gu 2024, arXiv 2405.21060, section 7; used alike by arXiv 2406.06484 and 2412.06464.
    """

    def __init__(
        self, channels: int, size: int = 4, *, bias: bool = False, device: object = None, dtype: object = None
    ):
        super().__init__()
        if size < 2:
            raise ValueError(f"ShortConvolution: size is {size}; expected at least 2 tokens")
        self.channels, self.size = channels, size
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
        """[B, T + size - 1, channels] -> [B, T, channels]

        As an image of height 1 whose channels come last, which is how x lies: conv1d would copy it to and fro.
        """
        image = extended.unsqueeze(1).permute(0, 3, 1, 2)
        y = F.conv2d(image, self.weight[:, None, None], self.bias, groups=self.channels)
        return F.silu(y.permute(0, 2, 3, 1).squeeze(1))

    def step(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """One token of each sequence, x [B, channels]; the state [B, size - 1, channels] moves on in place."""
        window = torch.cat([state, x.unsqueeze(1).to(state.dtype)], 1)
        state.copy_(window[:, 1:])
        y = (window * self.weight.mT).sum(1)
        return F.silu(y if self.bias is None else y + self.bias).to(x.dtype)
