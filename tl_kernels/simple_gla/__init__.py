"""Scalar-gated linear attention: simple GLA, RetNet, Lightning Attention, Mamba-2 SSD."""

from tl_kernels.simple_gla import cpu

KERNELS = {"cpu": cpu.KERNELS}
