"""Every layer: in parallel, token by token, in pieces, packed and padded, it is one function."""

import copy

import pytest
import torch

from linattn_tl.modules import (
    GatedDeltaNet,
    HybridStack,
    LinearAttention,
    Mamba2,
    ShortConvolution,
    SoftmaxAttention,
    TransformerBlock,
)
from linattn_tl.modules.norms import RMSNorm
from tests.modules.models import HEADS, LAYERS, WIDTH, error, layer_of, stepped, truth

FP32 = 1e-5  # relative RMS, as of the ops
SEGMENTS = (1, 3, 64, 65, 67)
every_layer = pytest.mark.parametrize("name", LAYERS)


def tokens(B, T, seed=1):
    return torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(seed))


@every_layer
def test_parallel_equals_the_recurrence_in_float64(name):
    layer, x = layer_of(name), tokens(2, 70)
    exact = truth(layer, x)
    assert error(layer(x)[0], exact) < FP32
    assert error(stepped(layer, x), exact) < FP32


@every_layer
def test_pieces_equal_the_whole(name):
    layer, x = layer_of(name), tokens(2, sum(SEGMENTS))
    with torch.no_grad():
        whole, last = layer(x, keep_state=True)
        parts, state = [], None
        for piece in x.split(SEGMENTS, 1):
            y, state = layer(piece, state, keep_state=True)
            parts.append(y)
    assert error(torch.cat(parts, 1), whole) < 1e-4
    for key, kept in state.tensors().items():
        assert error(kept, getattr(last, key)) < 1e-4


@every_layer
def test_a_step_after_a_prompt(name):
    layer, x = layer_of(name), tokens(2, 21)
    with torch.no_grad():
        whole = layer(x)[0]
        _, state = layer(x[:, :20], keep_state=True)
        assert error(layer.step(x[:, 20], state), whole[:, 20]) < FP32


@every_layer
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name, side):
    """Whatever lies in it: here NaN."""
    layer, lengths, T = layer_of(name), (9, 1, 5, 0), 9
    x, mask, alone = torch.full((4, T, WIDTH), float("nan")), torch.zeros(4, T, dtype=torch.bool), []
    for i, n in enumerate(lengths):
        where = slice(T - n, T) if side == "left" else slice(0, n)
        row = tokens(1, n, seed=i)
        x[i, where], mask[i, where] = row[0], True
        alone.append(layer(row)[0][0])
    y, state = layer(x, keep_state=True, mask=mask)
    assert not y[~mask].any()
    assert error(y[mask], torch.cat(alone)) < FP32
    assert state.batch == 4
    upcoming = tokens(4, 1, seed=9)[:, 0]
    with torch.no_grad():
        y1 = layer.step(upcoming, state.changed(torch.detach))
    for i, n in enumerate(lengths):
        row = torch.cat([tokens(1, n, seed=i), upcoming[i : i + 1, None]], 1)
        assert error(y1[i], layer(row)[0][0, -1]) < FP32


@every_layer
def test_packed_sequences_do_not_see_each_other(name):
    layer, x = layer_of(name), tokens(1, 90)
    cu_seqlens = torch.tensor([0, 7, 71, 71, 72, 90])
    y, state = layer(x, keep_state=True, cu_seqlens=cu_seqlens)
    for i, (a, b) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        if a == b:
            continue
        alone, kept = layer(x[:, a:b], keep_state=True)
        assert error(y[:, a:b], alone) < FP32
        for key, row in kept.tensors().items():
            mine = getattr(state, key)[i : i + 1]
            mine = mine[:, :, : row.shape[2]] if key in ("k", "v") else mine
            assert error(mine, row) < FP32


@every_layer
def test_a_mask_may_have_holes_and_a_state_before_it(name):
    layer, x = layer_of(name), tokens(1, 20)
    kept = torch.arange(12) % 3 != 1
    with torch.no_grad():
        whole = layer(torch.cat([x[:, :8], x[:, 8:][:, kept]], 1))[0][:, 8:]
        _, state = layer(x[:, :8], keep_state=True)
        for mask in (kept.unsqueeze(0), kept.unsqueeze(0).int()):
            assert error(layer(x[:, 8:], state, mask=mask)[0][:, kept], whole) < FP32


@every_layer
def test_no_tokens_and_no_sequences(name):
    layer, x = layer_of(name), tokens(1, 6)
    with torch.no_grad():
        y, state = layer(x, keep_state=True)
        for empty, options in (
            (x[:, :0], {}),
            (x[:, :0], {"cu_seqlens": torch.tensor([0, 0], dtype=torch.int32)}),
            (x, {"mask": torch.zeros(1, 6, dtype=torch.bool)}),
        ):
            nothing, after = layer(empty, state, keep_state=True, **options)
            assert nothing.shape == empty.shape and not nothing.any()
            for key, before in state.tensors().items():
                assert torch.equal(getattr(after, key), before)
        nothing, after = layer(x[:0], layer.init_state(0), keep_state=True)
        assert nothing.shape == (0, 6, WIDTH) and after.batch == 0
        assert layer.step(x[:0, 0], after).shape == (0, WIDTH)


@every_layer
def test_lengths_that_do_not_fit_are_refused(name):
    layer, x = layer_of(name), tokens(1, 10)
    owner = type(layer).__name__
    for values, message in (
        ([2, 10], "cu_seqlens starts with 2; expected 0"),
        ([0, 7, 5, 10], "cu_seqlens decreases from 7 to 5"),
        ([0, 99], "cu_seqlens ends with 99; expected T = 10"),
    ):
        with pytest.raises(ValueError, match=f"{owner}: {message}"):
            layer(x, cu_seqlens=torch.tensor(values))
    with pytest.raises(TypeError, match=f"{owner}: cu_seqlens has dtype float32; expected int32, int64"):
        layer(x, cu_seqlens=torch.tensor([0.0, 10.0]))


@every_layer
def test_packed_pieces_go_on_from_states(name):
    layer, x = layer_of(name), tokens(2, 30)
    with torch.no_grad():
        whole = layer(x)[0]
        _, state = layer(x[:, :10], keep_state=True)
        packed = torch.cat([x[0, 10:30], x[1, 10:12]]).unsqueeze(0)
        y, state = layer(packed, state, keep_state=True, cu_seqlens=torch.tensor([0, 20, 22]))
        assert error(y[0, :20], whole[0, 10:]) < FP32
        assert error(y[0, 20:], whole[1, 10:12]) < FP32
        y1 = layer.step(torch.stack([x[0, 0], x[1, 12]]), state)
        assert error(y1[1], whole[1, 12]) < FP32


@every_layer
def test_gradients_are_those_of_float64(name):
    layer, x = layer_of(name), tokens(2, 40)
    exact = copy.deepcopy(layer).double()
    upstream = tokens(2, 40, seed=2)
    grads = torch.autograd.grad(layer(x)[0], list(layer.parameters()), upstream)
    exact_grads = torch.autograd.grad(exact(x.double())[0], list(exact.parameters()), upstream.double())
    for (key, _), g, wanted in zip(layer.named_parameters(), grads, exact_grads, strict=True):
        assert g.isfinite().all(), key
        assert error(g, wanted) < 2e-5, key


@every_layer
def test_padding_has_no_gradient(name):
    layer, x = layer_of(name), tokens(2, 12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :5] = mask[1, 9:] = False
    x.requires_grad_()
    layer(x, mask=mask)[0].square().sum().backward()
    assert not x.grad[~mask].any()
    assert x.grad[mask].abs().sum(-1).min() > 0


@pytest.mark.parametrize("name", ["linear, all options", "mamba2", "gated delta", "softmax"])
def test_gradients_flow_through_a_carried_state(name):
    layer, x = layer_of(name), tokens(2, 24).requires_grad_()
    (whole,) = torch.autograd.grad(layer(x)[0].square().sum(), x)
    first, state = layer(x[:, :11], keep_state=True)
    second, _ = layer(x[:, 11:], state)
    (pieces,) = torch.autograd.grad(first.square().sum() + second.square().sum(), x)
    assert error(pieces, whole) < FP32


@every_layer
def test_runs_are_bitwise_repeatable(name):
    layer, x = layer_of(name), tokens(2, 100)
    results = []
    for _ in range(2):
        y = layer(x)[0]
        results.append([y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@every_layer
def test_bfloat16(name):
    layer = layer_of(name, dtype=torch.bfloat16)
    x = tokens(2, 50).bfloat16()
    exact = truth(layer, x)
    y, state = layer(x, keep_state=True)
    assert y.dtype is torch.bfloat16
    assert error(y, exact) < 2e-2
    assert error(stepped(layer, x), exact) < 2e-2
    assert all(t.dtype is torch.float32 for key, t in state.tensors().items() if key in ("kv", "z"))


@every_layer
def test_autocast(name):
    layer, x = layer_of(name), tokens(2, 50)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x, keep_state=True)
        with torch.no_grad():
            y1 = layer.step(x[:, 0], state.changed(lambda t: t.detach().clone()))
    exact = truth(layer, torch.cat([x, x[:, :1]], 1))
    assert error(y, exact[:, :-1]) < 2e-2
    assert error(y1, exact[:, -1]) < 2e-2
    y.float().square().sum().backward()
    assert all(p.grad.dtype is torch.float32 and p.grad.isfinite().all() for p in layer.parameters())


@every_layer
def test_what_sharding_needs(name):
    """No buffers, and no parameter without an axis to split; made on no device, then given memory."""
    layer = layer_of(name)
    assert not list(layer.buffers())
    assert all(p.ndim for p in layer.parameters())
    made = layer_of(name, device="meta")
    assert {p.device.type for p in made.parameters()} == {"meta"}
    made = made.to_empty(device="cpu")
    made.load_state_dict(layer.state_dict())
    x = tokens(1, 8)
    assert torch.equal(made(x)[0], layer(x)[0])


def test_names_of_parameters_stay():
    """A checkpoint of this version loads into later ones."""
    plain, controls = {"qkv.weight": (96, 32), "out.weight": (32, 32)}, {"controls.weight": (2, 32)}
    conv, norm, gate = {"conv.weight": (96, 4)}, {"norm.weight": (16,)}, {"gate.weight": (32, 32)}
    decay = {"A_log": (2,), "dt_bias": (2,)}
    expected = {
        "L": plain,
        "R": {**plain, **norm, **gate},
        "G": {**plain, **controls, **conv, **norm, **gate},
        "M": {**plain, **controls, **conv, **gate, **decay, "conv.bias": (96,), "norm.weight": (32,), "D": (2,)},
        "D": {**plain, **controls, **conv, **norm},
        "N": {**plain, **conv, **norm, **gate, **decay, "controls.weight": (4, 32)},
        "S": plain,
    }
    around = {
        "norm.weight": (32,),
        "mlp_norm.weight": (32,),
        "mlp.gate_up.weight": (192, 32),
        "mlp.down.weight": (32, 96),
    }
    stack = HybridStack(WIDTH, HEADS, "".join(expected))
    wanted = {}
    for i, layer in enumerate(expected.values()):
        block = {**around, **{f"layer.{key}": shape for key, shape in layer.items()}}
        wanted |= {f"blocks.{i}.{key}": shape for key, shape in block.items()}
    assert {key: tuple(x.shape) for key, x in stack.state_dict().items()} == wanted


def test_the_article_s_layer_is_its_formula():
    """Eq. 9 in float64, written out with its quadratic matrix."""
    layer, x = layer_of("linear").double(), tokens(2, 30).double()
    q, k, v = layer.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
    weights = ((torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1).mT).tril()
    o = weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)
    assert error(layer(x)[0], layer.out(o.transpose(1, 2).flatten(-2))) < 1e-12


def test_softmax_is_its_formula():
    layer, x = layer_of("softmax, grouped, no positions").double(), tokens(2, 30).double()
    q, k, v = layer.qkv(x).unflatten(-1, (8, 8)).transpose(1, 2).split([4, 2, 2], 1)
    k, v = (y.repeat_interleave(2, 1) for y in (k, v))
    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(30, 30, dtype=torch.bool).triu(1), float("-inf"))
    assert error(layer(x)[0], layer.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))) < 1e-12


def test_rotary_positions_are_relative():
    from linattn_tl.modules.softmax import rotated

    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(m, n):
        rows = (rotated(x, torch.tensor([[p]]), 100.0) for x, p in ((q, m), (k, n)))
        return torch.mul(*rows).sum().item()

    assert score(5, 2) == pytest.approx(score(103, 100), rel=1e-5)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3


def test_the_short_convolution_sees_its_last_tokens_only():
    layer = layer_of("linear, all options")
    a, b = tokens(1, 9), tokens(1, 9)
    b[:, 3] += 1
    changed = (layer.conv(layer.qkv(a))[0] != layer.conv(layer.qkv(b))[0]).any(-1)[0]
    assert changed.tolist() == [False] * 3 + [True] * 3 + [False] * 3


def test_the_convolution_s_gradient():
    """Against differences, once and twice; and under torch.func."""
    conv = ShortConvolution(5, 4, bias=True).double()
    torch.nn.init.normal_(conv.bias)
    x = torch.randn(2, 9, 5, dtype=torch.float64, requires_grad=True)
    names = dict(conv.named_parameters())

    def called(x, *values):
        return torch.func.functional_call(conv, dict(zip(names, values, strict=True)), (x,))[0]

    assert torch.autograd.gradcheck(called, (x, *names.values()))
    assert torch.autograd.gradgradcheck(called, (x, *names.values()))
    several = torch.stack([x, 2 * x])
    mapped = torch.func.vmap(lambda x: conv(x)[0])(several)
    assert error(mapped, torch.stack([conv(x)[0], conv(2 * x)[0]])) < 1e-12


def test_the_norm_s_gradient():
    """Against differences, once and twice, at zero too; against torch's own; and under torch.func."""
    norm = RMSNorm(6, eps=1e-3).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    x[0, 0] = 0
    x.requires_grad_()
    plain = torch.nn.functional.rms_norm(x, (6,), norm.weight, 1e-3)
    assert error(norm(x), plain) < 1e-14
    upstream = torch.randn_like(x)
    for mine, theirs in zip(
        torch.autograd.grad(norm(x), (x, norm.weight), upstream),
        torch.autograd.grad(plain, (x, norm.weight), upstream),
        strict=True,
    ):
        assert error(mine, theirs) < 1e-13

    def called(x, weight):
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(called, (x, norm.weight))
    assert torch.autograd.gradgradcheck(called, (x, norm.weight))
    assert error(torch.func.vmap(norm)(torch.stack([x, 2 * x])), torch.stack([norm(x), norm(2 * x)])) < 1e-14


# ---- bad input


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("linear", r"LinearAttention: state.kv is \(3, 2, 16, 16\); expected \(2, 2, 16, 16\)"),
        ("softmax", r"SoftmaxAttention: state.k is \(3, 2, 0, 16\); expected \(2, 2, 0, 16\)"),
    ],
)
def test_a_state_of_another_batch_is_refused(name, message):
    layer = layer_of(name)
    with pytest.raises(ValueError, match=message):
        layer(tokens(2, 4), layer.init_state(3))
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        layer.step(tokens(2, 1)[:, 0], layer.init_state(3))


def test_a_state_of_another_layer_is_refused():
    layer, x = layer_of("gated delta"), tokens(2, 4)
    with pytest.raises(ValueError, match=r"GatedDeltaNet: state.kv is .*; expected \(2, 4, 16, 8\)"):
        layer(x, layer_of("linear").init_state(2))
    without = layer.init_state(2)
    without.conv = None
    with pytest.raises(ValueError, match=r"GatedDeltaNet: state\.conv is missing"):
        layer(x, without)
    with pytest.raises(TypeError, match="GatedDeltaNet: state is KVState; expected RecurrentState"):
        layer(x, layer_of("softmax").init_state(2))
    with pytest.raises(TypeError, match="SoftmaxAttention: state is RecurrentState; expected KVState"):
        layer_of("softmax")(x, layer.init_state(2))


def test_masks_that_do_not_match_are_refused():
    layer, x = layer_of("linear"), tokens(2, 4)
    with pytest.raises(ValueError, match=r"LinearAttention: mask has shape \(2, 5\); expected \[B, T\] = \(2, 4\)"):
        layer(x, mask=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"mask has dtype torch\.float32; expected bool"):
        layer(x, mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"mask has -10000; expected 1 \(real\) or 0 \(padding\)"):
        layer(x, mask=torch.tensor([[0, 0, -10000, -10000]] * 2))
    with pytest.raises(TypeError, match="mask is list; expected a tensor"):
        layer(x, mask=[[1, 1, 1, 1]] * 2)
    with pytest.raises(ValueError, match="mask and cu_seqlens are both given"):
        layer(x, mask=torch.ones(2, 4, dtype=torch.bool), cu_seqlens=torch.tensor([0, 4]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearAttention(32, 3), "LinearAttention: width is 32; expected a multiple of heads = 3"),
        (lambda: LinearAttention(32, 2, value_heads=3), "value_heads is 3; expected a multiple of heads = 2"),
        (lambda: SoftmaxAttention(32, 4, kv_heads=3), "kv_heads is 3; expected a divisor of heads = 4"),
        (lambda: SoftmaxAttention(30, 2), "head_dim is 15; rotary positions need an even one"),
        (lambda: GatedDeltaNet(32, 2, conv_size=1), "ShortConvolution: size is 1; expected at least 2"),
        (lambda: HybridStack(32, 2, "LLXS"), "HybridStack: pattern has 'X'; expected L "),
        (lambda: HybridStack(32, 2, ""), "HybridStack: pattern is empty"),
        (lambda: HybridStack(32, 2, "L", 0), "HybridStack: layers is 0; expected at least 1"),
        (lambda: HybridStack(32, 2, "L", options={"Q": {}}), "HybridStack: options has 'Q'"),
        (lambda: HybridStack(32, 2, "LN", options={"LN": {}}), "HybridStack: options has 'LN'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="hidden"):
        LinearAttention(32, 2, hidden=3)
    with pytest.raises(TypeError, match="hidden"):
        HybridStack(32, 2, "L", options={"L": {"hidden": 3}})
    with pytest.raises(TypeError, match="Mamba2: gate or norm is given"):
        Mamba2(32, 2, norm=False)


@every_layer
def test_a_step_under_grad_is_refused(name):
    layer = layer_of(name)
    state = layer.init_state(1)
    before = state.changed(torch.clone)
    with pytest.raises(ValueError, match="requires a gradient"):
        layer.step(tokens(1, 1)[:, 0], state)
    assert all(torch.equal(x, getattr(before, key)) for key, x in state.tensors().items())


@every_layer
def test_a_state_keeps_nothing_else_alive(name):
    _, state = layer_of(name)(tokens(2, 40), keep_state=True)
    assert sum(x.untyped_storage().nbytes() for x in state.tensors().values()) == state.nbytes


def test_a_block_takes_any_layer():
    block = TransformerBlock(layer_of("delta"), WIDTH, mlp_width=0)
    x = tokens(2, 20)
    assert block.mlp is None
    assert error(stepped(block, x), block(x)[0]) < FP32
