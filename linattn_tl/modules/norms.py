"""The norm of layers and blocks."""

from typing import Any

import torch
from torch import nn


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean x^2 + eps) times a weight a channel, in the dtype of the weights.

    Under autocast torch's own takes a slow way, with a warning, where x is of another dtype.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.weight.dtype)
        wide = x.dtype in (torch.float32, torch.float64)
        if wide and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _Normalize.apply(x, self.weight, self.eps)  # pyright: ignore[reportReturnType]
        return super().forward(x)


class _Normalize(torch.autograd.Function):
    """rms_norm with a gradient in fewer passes over memory than torch's own makes.

        r = (mean x^2 + eps)^-1/2     n = x r     y = n w     dx = r (h - n mean(h n)), h = dy w     dw = sum dy n

    Differentiable again, for it is made of torch's functions.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x * _scale_of(x, eps) * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.eps = inputs[2]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        r = _scale_of(x, ctx.eps)
        n = x * r
        dx, dweight = None, None
        if ctx.needs_input_grad[0]:
            h = dy * weight
            dx = torch.addcmul(h, n, torch.linalg.vecdot(h, n).unsqueeze(-1) / -x.shape[-1]) * r
        if ctx.needs_input_grad[1]:
            dweight = (dy * n).flatten(0, -2).sum(0)
        return dx, dweight, None


def _scale_of(x: torch.Tensor, eps: float) -> torch.Tensor:
    return (torch.linalg.vecdot(x, x).unsqueeze(-1) / x.shape[-1] + eps).rsqrt()
