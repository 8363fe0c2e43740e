"""Layers, blocks, hybrid stacks and generation: nn.Modules that call the ops and nothing else.

Each layer reads whole sequences in `forward`, in parallel, and one token in `step`, as an RNN; the two agree.
"""

from linattn_tl.modules.convolution import ShortConvolution
from linattn_tl.modules.generation import Sampling, generate, prefill
from linattn_tl.modules.language_model import CausalLM, Output
from linattn_tl.modules.recurrent import (
    DeltaNet,
    GatedDeltaNet,
    LinearAttention,
    Mamba2,
    RecurrentLayer,
    Retention,
    SimpleGLA,
)
from linattn_tl.modules.softmax import SoftmaxAttention
from linattn_tl.modules.stacks import LAYERS, GatedMLP, HybridStack, TransformerBlock
from linattn_tl.modules.states import Cache, KVState, RecurrentState

__all__ = [
    "LAYERS",
    "Cache",
    "CausalLM",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedMLP",
    "HybridStack",
    "KVState",
    "LinearAttention",
    "Mamba2",
    "Output",
    "RecurrentLayer",
    "RecurrentState",
    "Retention",
    "Sampling",
    "ShortConvolution",
    "SimpleGLA",
    "SoftmaxAttention",
    "TransformerBlock",
    "generate",
    "prefill",
]
