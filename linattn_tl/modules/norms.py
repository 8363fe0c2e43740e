"""The norm of layers and blocks."""

import torch
from torch import nn


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean x^2 + eps) times a weight a channel, in the dtype of the weights.

    Under autocast torch's own takes a slow way, with a warning, where x is of another dtype.

    Source: Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.weight.dtype))
