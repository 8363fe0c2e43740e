"""Normalised linear attention with a feature map, arXiv 2006.16236."""

from tl_kernels.linear_attention import cpu, cuda

KERNELS = {"cpu": cpu.KERNELS, "cuda": cuda.KERNELS}
