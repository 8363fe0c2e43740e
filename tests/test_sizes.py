"""Sizes of states and caches, against numbers worked out by hand."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import linattn_tl
from linattn_tl.sizes import SOFTMAX, Growth, LayerShape, ModelShape, SizeError, cache_elements

ROOT = Path(__file__).resolve().parents[1]
LAYER = LayerShape(H=32, K=128, V=128, normalizer=False, kv_heads=8)  # state 524,288; MLA 4 * 128 + 64
SHAPES: tuple[dict[str, Any], ...] = (
    {"H": 1, "K": 1, "V": 1},
    {"H": 2, "HV": 6, "K": 5, "V": 7, "kv_heads": 3},
    {"H": 8, "K": 64, "V": 64, "normalizer": False},
    {"H": 16, "HV": 32, "K": 128, "V": 128, "normalizer": False, "conv_size": 4, "kv_heads": 4},
    {"H": 3, "K": 2, "V": 11, "latent": 1, "rope": 0},
)


def test_the_call_of_old():
    found = linattn_tl.cache_elements(H=8, K=64, V=64, T=1000)
    assert (found.state, found.kv_cache, found.crossover) == (8 * 64 * 64 + 8 * 64, 1000 * 1024, 33)
    assert found.caches["mha"] == (found.kv_cache, found.crossover)
    assert cache_elements(H=1, K=1, V=1, T=0).kv_cache == 0


@pytest.mark.parametrize("D", [1, 2, 7, 64, 127, 128])
@pytest.mark.parametrize("H", [1, 6])
def test_crossover_with_equal_heads_is_half_the_head_dim(H: int, D: int):
    assert cache_elements(H=H, K=D, V=D, T=1, normalizer=False).crossover == -(-D // 2)
    assert cache_elements(H=H, K=D, V=D, T=1).crossover == -(-(D + 1) // 2)


def test_each_kind_by_hand():
    """32 heads of 128, 8 KV heads, DeepSeek-V2's latent: 8192, 2048, 256 and 576 elements a token, state 524,288."""
    found = cache_elements(H=32, K=128, V=128, T=10, normalizer=False, kv_heads=8, latent=512, rope=64)
    assert found.state == 524288
    assert found.caches == {"mha": (81920, 64), "gqa": (20480, 256), "mqa": (2560, 2048), "mla": (5760, 911)}


def test_grouped_heads_and_the_short_convolution_by_hand():
    """H = 2 heads of q and k, HV = 6 of v, K = 5, V = 7."""
    sizes = {"H": 2, "HV": 6, "K": 5, "V": 7}
    assert LayerShape(**sizes, normalizer=False).state == 210
    assert LayerShape(**sizes).state == 210 + 10
    assert LayerShape(**sizes, conv_size=4).state == 220 + 3 * (10 + 10 + 42)
    assert LayerShape(**sizes, kv_heads=3, latent=9, rope=2).per_token == {"mha": 52, "gqa": 36, "mqa": 12, "mla": 11}


@pytest.mark.parametrize(("heads", "groups"), [(32, 8), (8, 2), (4, 1), (2, 1), (6, 1)])
def test_defaults(heads: int, groups: int):
    layer = LayerShape(H=heads, K=128, V=64)
    assert (layer.value_heads, layer.groups, layer.latents) == (heads, groups, (512, 64))


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("kind", SOFTMAX)
def test_crossover_is_the_smallest_length(sizes: dict[str, Any], kind: str):
    state, _, _, caches = cache_elements(**sizes, T=1)
    T = caches[kind].crossover
    assert cache_elements(**sizes, T=T).caches[kind].elements >= state
    assert cache_elements(**sizes, T=T - 1).caches[kind].elements < state


def test_growth():
    cache, state = Growth(0, 3), Growth(10, 0)
    assert (cache.at(0), cache.at(4), state.at(4)) == (0, 12, 10)
    assert cache.crossover(state) == 4
    assert cache.crossover(Growth(9, 0)) == 3
    assert Growth(0, 3).crossover(Growth(10, 1)) == 5
    assert Growth(0, 3).crossover(Growth(10, 3)) is None
    assert Growth(0, 3).crossover(Growth(10, 4)) is None
    assert state.crossover(cache) == 0
    assert cache.crossover(cache) == 0


def test_hybrid_model_by_hand():
    """Six linear layers and two of GQA, in elements and in bytes."""
    model = ModelShape(layer=LAYER, layers=8, pattern="LLLS", softmax="gqa")
    assert model.growth() == (6 * 524288, 2 * 2048)
    assert model.growth().at(1000) == 6 * 524288 + 2 * 2048 * 1000
    in_bytes = ModelShape(layer=LAYER, layers=8, pattern="LLLS", softmax="gqa", state_bytes=4, kv_bytes=2)
    assert in_bytes.growth() == (4 * 6 * 524288, 2 * 2 * 2048)


@pytest.mark.parametrize(
    ("pattern", "layers", "softmax_layers"),
    [("L", 5, 0), ("S", 5, 5), ("LLLS", 3, 0), ("LLLS", 7, 1), ("SL", 5, 3), ("DGMRAS", 6, 1), ("LLSS", 3, 1)],
)
def test_pattern_is_repeated_and_cut(pattern: str, layers: int, softmax_layers: int):
    growth = ModelShape(layer=LAYER, layers=layers, pattern=pattern, softmax="mla").growth()
    assert growth == ((layers - softmax_layers) * 524288, softmax_layers * 576)


def test_fp32_states_against_16_bit_caches_double_the_crossover():
    linear = ModelShape(layer=LAYER, layers=32, pattern="L", state_bytes=4, kv_bytes=2).growth()
    for kind, T in {"mha": 128, "gqa": 512, "mqa": 4096, "mla": 1821}.items():
        cache = ModelShape(layer=LAYER, layers=32, pattern="S", softmax=kind, state_bytes=4, kv_bytes=2).growth()
        assert cache.crossover(linear) == T
        assert cache.at(T) >= linear.at(T) and cache.at(T - 1) < linear.at(T - 1)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"H": 0}, "cache_elements: H is 0; expected at least 1"),
        ({"K": -3}, "cache_elements: K is -3; expected at least 1"),
        ({"V": 1.5}, "cache_elements: V is 1.5; expected an integer of at least 1"),
        ({"T": -1}, "cache_elements: T is -1; expected at least 0"),
        ({"HV": 7}, "cache_elements: HV is 7; expected a multiple of H = 2"),
        ({"HV": 0}, "cache_elements: HV is 0; expected at least 1"),
        ({"conv_size": 0}, "cache_elements: conv_size is 0; expected at least 1"),
        ({"HV": 4, "kv_heads": 3}, "cache_elements: kv_heads is 3; expected a divisor of HV = 4"),
        ({"kv_heads": 0}, "cache_elements: kv_heads is 0; expected at least 1"),
        ({"latent": 0}, "cache_elements: latent is 0; expected at least 1"),
        ({"rope": -1}, "cache_elements: rope is -1; expected at least 0"),
        ({"rope": "8"}, "cache_elements: rope is '8'; expected an integer of at least 0"),
    ],
)
def test_bad_sizes_are_named(sizes: dict[str, Any], message: str):
    with pytest.raises(ValueError) as raised:
        cache_elements(**{"H": 2, "K": 4, "V": 4, "T": 1, **sizes})
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "layers is 0; expected at least 1"),
        ({"pattern": ""}, "pattern is ''; expected capital letters"),
        ({"pattern": "LLs"}, "pattern is 'LLs'; expected capital letters"),
        ({"pattern": None}, "pattern is None; expected capital letters"),
        ({"softmax": "MHA"}, "softmax is 'MHA'; expected one of mha, gqa, mqa, mla"),
        ({"state_bytes": 0}, "state_bytes is 0; expected at least 1"),
        ({"kv_bytes": 0.5}, "kv_bytes is 0.5; expected an integer of at least 1"),
    ],
)
def test_bad_models_are_named(options: dict[str, Any], message: str):
    with pytest.raises(SizeError) as raised:
        ModelShape(**{"layer": LAYER, "layers": 4, **options})
    assert str(raised.value).startswith(message)
    assert str(copy.copy(raised.value)) == str(raised.value)


def test_a_negative_length_is_refused():
    with pytest.raises(SizeError, match="T is -1; expected at least 0"):
        Growth(1, 1).at(-1)


def test_importing_it_brings_neither_torch_nor_matplotlib():
    script = "import sys, linattn_tl.sizes; print({'torch', 'matplotlib', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "set()\n"
