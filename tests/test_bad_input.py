"""What cannot be served is refused before anything is written: op, argument, what came, what was expected."""

import re

import numpy as np
import pytest
import torch

from linattn_tl import LinearState, explain, linear_attention, linear_attention_decode

pytestmark = pytest.mark.usefixtures("binaries")
B, T, H, HV, K, V, P = 2, 9, 2, 4, 16, 24, 5
ints = torch.tensor
rand = torch.randn


def sequence_arguments():
    return {
        "q": rand(B, T, H, K),
        "k": rand(B, T, H, K),
        "v": rand(B, T, HV, V),
        "initial_state": LinearState(rand(B, HV, K, V), torch.rand(B, H, K)),
    }


def packed_arguments():
    return {"q": rand(1, T, H, K), "k": rand(1, T, H, K), "v": rand(1, T, HV, V), "cu_seqlens": ints([0, 4, T])}


def decode_arguments():
    return {
        "q": rand(B, H, K),
        "k": rand(B, H, K),
        "v": rand(B, HV, V),
        "state": LinearState(rand(B, HV, K, V), torch.rand(B, H, K)),
        "out": torch.full((B, HV, V), float("nan")),
    }


def pool_arguments():
    pool = LinearState(rand(P, HV, K, V), torch.rand(P, H, K))
    return {**decode_arguments(), "state": pool, "slots": ints([3, -1])}


def state(kv=(B, HV, K, V), z=(B, H, K), dtype=torch.float32, device="cpu"):
    return LinearState(torch.ones(kv, dtype=dtype, device=device), torch.ones(z, dtype=dtype, device=device))


# What is wrong, its error, and the words that name the argument, what came and what was expected.
Row = tuple[dict, type[Exception], tuple[str, ...]]


def value(*words, **changed) -> Row:
    return changed, ValueError, words


def kind(*words, **changed) -> Row:
    return changed, TypeError, words


SEQUENCE: dict[str, Row] = {
    "q rank": value("q has shape (9, 2, 16)", "[B, T, H, K]", q=rand(T, H, K)),
    "k rank": value("k has shape (2, 9, 16)", "[B, T, H, K]", k=rand(B, T, K)),
    "v rank": value("v has shape (2, 9, 4, 24, 1)", "HV, V]", v=rand(B, T, HV, V, 1)),
    "k batch": value("k has shape (3, 9, 2, 16)", "(2, 9, 2, 16)", "B from q", k=rand(3, T, H, K)),
    "k time": value("k has shape (2, 8, 2, 16)", "(2, 9, 2, 16)", "T from q", k=rand(B, 8, H, K)),
    "k heads": value("k has shape (2, 9, 3, 16)", "(2, 9, 2, 16)", "H from q", k=rand(B, T, 3, K)),
    "k dim": value("k has shape (2, 9, 2, 8)", "(2, 9, 2, 16)", "K from q", k=rand(B, T, H, 8)),
    "v batch": value("v has shape (1, 9, 4, 24)", "(2, 9, 4, 24)", "B from", v=rand(1, T, HV, V)),
    "v time": value("v has shape (2, 8, 4, 24)", "(2, 9, 4, 24)", "from k", v=rand(B, 8, HV, V)),
    "v heads": value("v has HV = 3", "a multiple of H = 2", v=rand(B, T, 3, V)),
    "q no tensor": kind("q is list", "a tensor", q=[[1.0]]),
    "v None": kind("v is NoneType", "a tensor", v=None),
    "k numpy": kind("k is ndarray", "a tensor", k=np.ones((B, T, H, K), "float32")),
    "q integers": kind("q has dtype int64", "float32", q=torch.ones(B, T, H, K, dtype=torch.int64)),
    "k sparse": value("k", "sparse", k=rand(B, T, H, K).to_sparse()),
    "v complex": kind("v has dtype complex64", "float32", v=rand(B, T, HV, V) + 0j),
    "k device": value("k is on meta", "cpu", k=rand(B, T, H, K, device="meta")),
    "v device": value("v is on meta", "cpu", v=rand(B, T, HV, V, device="meta")),
    "state tensor": kind("initial_state is Tensor", "LinearState", initial_state=rand(B, HV, K, V)),
    "state triple": kind("initial_state is tuple", "(kv, z)", initial_state=(1, 2, 3)),
    "state no z": kind("initial_state.z is NoneType", "[N, H, K]", initial_state=(rand(B, HV, K, V), None)),
    "state kv shape": value(
        "initial_state.kv has shape (2, 4, 24, 16)", "(2, 4, 16, 24)", initial_state=state(kv=(B, HV, V, K))
    ),
    "state z shape": value("initial_state.z has shape (2, 4, 16)", "(2, 2, 16)", initial_state=state(z=(B, HV, K))),
    "state N": value(
        "initial_state.kv has shape (1, 4, 16, 24)", "(2, 4, 16, 24)", initial_state=state((1, HV, K, V), (1, H, K))
    ),
    "state dtype": kind("initial_state.kv has dtype bfloat16", "float32", initial_state=state(dtype=torch.bfloat16)),
    "state double": kind("initial_state.kv has dtype float64", "float32", initial_state=state(dtype=torch.float64)),
    "state device": value("initial_state.kv is on meta", "cpu", initial_state=state(device="meta")),
    "feature map name": value("feature_map is 'gelu'", "elu1, relu, identity", feature_map="gelu"),
    "feature map type": kind("feature_map is int", "callable", feature_map=3),
    "feature map None": kind("feature_map is NoneType", "callable", feature_map=None),
    "feature map rank": value("feature_map", "(2, 9, 2)", feature_map=lambda x: x.sum(-1)),
    "feature map time": value("feature_map", "(2, 8, 2, 16)", feature_map=lambda x: x[:, 1:]),
    "feature map output": kind("feature_map", "NoneType", feature_map=lambda x: None),
    "backend": value("backend is 'cuda'", "auto, binary, jit, cupy, torch", backend="cuda"),
    "keyword": kind("head_first", head_first=True),
    "cu_seqlens with a batch": value("B = 2 with cu_seqlens", "B = 1", cu_seqlens=ints([0, T])),
}
PACKED: dict[str, Row] = {
    "cu_seqlens list": kind("cu_seqlens is list", "a tensor", cu_seqlens=[0, 9]),
    "cu_seqlens rank": value("cu_seqlens has shape (1, 2)", "[N+1]", cu_seqlens=ints([[0, 9]])),
    "cu_seqlens empty": value("cu_seqlens", "expected 0", cu_seqlens=ints([], dtype=torch.int64)),
    "cu_seqlens float": kind("cu_seqlens has dtype float32", "int32, int64", cu_seqlens=ints([0.0, 9.0])),
    "cu_seqlens int16": kind("cu_seqlens has dtype int16", "int32, int64", cu_seqlens=ints([0, 9], dtype=torch.int16)),
    "cu_seqlens device": value("cu_seqlens is on meta", "cpu", cu_seqlens=ints([0, 9]).to("meta")),
    "cu_seqlens negative": value("cu_seqlens starts with -1", "expected 0", cu_seqlens=ints([-1, 9])),
    "cu_seqlens late": value("cu_seqlens starts with 2", "expected 0", cu_seqlens=ints([2, 9])),
    "cu_seqlens decreasing": value("cu_seqlens decreases from 6 to 3", "index 2", cu_seqlens=ints([0, 6, 3, 9])),
    "cu_seqlens below zero": value("cu_seqlens decreases from 0 to -4", "index 1", cu_seqlens=ints([0, -4, 9])),
    "cu_seqlens past T": value("cu_seqlens ends with 10", "T = 9", cu_seqlens=ints([0, 10])),
    "cu_seqlens inside past T": value("cu_seqlens decreases from 99 to 9", cu_seqlens=ints([0, 99, 9])),
    "cu_seqlens short": value("cu_seqlens ends with 4", "T = 9", cu_seqlens=ints([0, 4])),
    "state N": value(
        "initial_state.kv has shape (1, 4, 16, 24)", "(2, 4, 16, 24)", initial_state=state((1, HV, K, V), (1, H, K))
    ),
    "cross": value("k has T_k = 5 with cu_seqlens", "T = 9", causal=False, k=rand(1, 5, H, K), v=rand(1, 5, HV, V)),
}
DECODE: dict[str, Row] = {
    "q rank": value("q has shape (2, 16)", "[B, n, H, K]", q=rand(H, K)),
    "k rank": value("k has shape (2, 1, 2, 16)", "[B, H, K]", k=rand(B, 1, H, K)),
    "k dim": value("k has shape (2, 2, 8)", "(2, 2, 16)", "K from q", k=rand(B, H, 8)),
    "v heads": value("v has HV = 3", "a multiple of H = 2", v=rand(B, 3, V), out=None),
    "v dtype": kind("v has dtype int32", "float32", v=rand(B, HV, V).int(), out=None),
    "k device": value("k is on meta", "cpu", k=rand(B, H, K, device="meta")),
    "q numpy": kind("q is ndarray", "a tensor", q=np.ones((B, H, K), "float32")),
    "state None": kind("state is None", "LinearState", state=None),
    "state list": kind("state is list", "LinearState", state=[rand(B, HV, K, V), torch.rand(B, H, K)]),
    "state empty": kind("state is tuple", "(kv, z)", state=()),
    "state rows": value("state.kv has shape (3, 4, 16, 24)", "(2, 4, 16, 24)", state=state((3, HV, K, V), (3, H, K))),
    "state dtype": kind("state.kv has dtype float16", "float32", state=state(dtype=torch.float16)),
    "state device": value("state.kv is on meta", "cpu", state=state(device="meta")),
    "state shared": value("state.kv", state=LinearState(rand(1, HV, K, V).expand(B, -1, -1, -1), torch.rand(B, H, K))),
    "out shape": value("out has shape (2, 4, 16)", "(2, 4, 24)", out=torch.zeros(B, HV, K)),
    "out dtype": kind("out has dtype bfloat16", "float32", out=torch.zeros(B, HV, V, dtype=torch.bfloat16)),
    "out device": value("out is on meta", "cpu", out=torch.zeros(B, HV, V, device="meta")),
    "out shared": value("out", out=torch.zeros(1, HV, V).expand(B, HV, V)),
    "q requires grad": value("q requires a gradient", "no_grad", q=rand(B, H, K, requires_grad=True)),
    "state requires grad": value(
        "state.kv requires a gradient",
        "no_grad",
        state=LinearState(rand(B, HV, K, V, requires_grad=True), torch.rand(B, H, K)),
    ),
    "out requires grad": value("out", "gradient", out=torch.zeros(B, HV, V, requires_grad=True)),
    "feature map": value("feature_map is 'softmax'", "elu1, relu, identity", feature_map="softmax"),
    "feature map rank": value("feature_map", "(2, 2)", feature_map=lambda x: x.sum(-1)),
    "backend": value("backend is 'triton'", "auto, binary, jit, cupy, torch", backend="triton"),
    "keyword": kind("causal", causal=True),
}
POOL: dict[str, Row] = {
    "slot past the pool": value("slots[1] is 5", "0 to 4", slots=ints([0, P])),
    "slot below -1": value("slots[0] is -2", "-1 (padding)", slots=ints([-2, 0])),
    "slot twice": value("slots[1] is 2 again", "at most once", slots=ints([2, 2])),
    "slots length": value("slots has shape (3,)", "[B] = (2,)", slots=ints([0, 1, 2])),
    "slots rank": value("slots has shape (2, 1)", "[B]", slots=ints([[0], [1]])),
    "slots float": kind("slots has dtype float32", "int32, int64", slots=ints([0.0, 1.0])),
    "slots bool": kind("slots has dtype bool", "int32, int64", slots=ints([True, False])),
    "slots list": kind("slots is list", "a tensor", slots=[0, 1]),
    "slots device": value("slots is on meta", "cpu", slots=ints([0, 1]).to("meta")),
    "state kv": value("state.kv has shape (5, 4, 24, 16)", "(5, 4, 16, 24)", state=state((P, HV, V, K), (P, H, K))),
    "state z": value("state.z has shape (2, 2, 16)", "(5, 2, 16)", state=state((P, HV, K, V), (B, H, K))),
    "state empty": kind("state is tuple", "(kv, z)", state=()),
    "state scalars": value("state.kv has shape ()", "[P, HV, K, V]", state=(torch.zeros(()), torch.zeros(()))),
}
TABLE = [
    (op, make, name, row)
    for op, make, rows in (
        (linear_attention, sequence_arguments, SEQUENCE),
        (linear_attention, packed_arguments, PACKED),
        (linear_attention_decode, decode_arguments, DECODE),
        (linear_attention_decode, pool_arguments, POOL),
    )
    for name, row in rows.items()
]
IDS = [f"{make.__name__.removesuffix('_arguments')}-{name}".replace(" ", "-") for _, make, name, _ in TABLE]


def flat(arguments):
    """Every CPU tensor among the arguments."""
    found = [x for a in arguments.values() for x in (a if isinstance(a, tuple) else (a,))]
    return [x.detach() for x in found if isinstance(x, torch.Tensor) and x.device.type == "cpu"]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(("op", "make", "name", "row"), TABLE, ids=IDS)
def test_refused(op, make, name, row, backend):
    changed, error, words = row
    arguments = {**make(), "backend": backend, **changed}
    op(**make(), backend=backend)  # what is not changed is right
    before = [x.clone() for x in flat(arguments)]
    with pytest.raises(error) as caught:
        op(**arguments)
    text = str(caught.value)
    for word in (op.__name__, *words, *(["expected"] if name != "keyword" else [])):
        assert word in text, f"{word!r} is not in: {text}"
    for x, y in zip(flat(arguments), before, strict=True):
        x, y = x.to_dense(), y.to_dense()  # one argument is sparse
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)), "something was written before the refusal"


@pytest.mark.parametrize("name", ["k dim", "state dtype", "feature map name", "q integers"])
def test_explain_refuses_as_the_call_does(name):
    changed, error, words = SEQUENCE[name]
    with pytest.raises(error, match=re.escape(words[0])):
        explain("linear_attention", **{**sequence_arguments(), **changed})


@pytest.mark.parametrize("op", [linear_attention, linear_attention_decode])
def test_meta_tensors_give_meta_tensors_or_a_refusal(op):
    arguments = sequence_arguments() if op is linear_attention else decode_arguments()
    on_meta = {
        n: LinearState(*(x.to("meta") for x in a)) if isinstance(a, tuple) else a.to("meta")
        for n, a in arguments.items()
    }
    with torch.no_grad():
        try:
            found = op(**on_meta)
        except (ValueError, TypeError) as error:
            assert op.__name__ in str(error) and "meta" in str(error)
        else:
            o = found if isinstance(found, torch.Tensor) else found[0]
            assert o.device.type == "meta" and o.shape == arguments["v"].shape


def test_an_unknown_op_is_refused():
    with pytest.raises(ValueError, match=r"op is 'attention'; expected one of .*linear_attention"):
        explain("attention")


def test_decode_of_leaves_is_allowed_without_gradients():
    arguments = decode_arguments()
    arguments["q"].requires_grad_()
    with torch.no_grad():
        linear_attention_decode(**arguments)
    assert arguments["out"].isfinite().all()


@pytest.mark.parametrize("n", [None, 1, 7])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("backend", ["binary", "torch"])
def test_an_out_that_is_an_input_is_right_or_refused(backend, name, n):
    lead = (B,) if n is None else (B, n)
    tensors = {x: rand(*lead, H, K) for x in "qkv"}
    state = LinearState(rand(B, H, K, K), torch.rand(B, H, K))
    fresh = LinearState(*(x.clone() for x in state))
    want = linear_attention_decode(**{x: t.clone() for x, t in tensors.items()}, state=fresh, backend=backend)
    try:
        got = linear_attention_decode(**tensors, state=state, out=tensors[name], backend=backend)
    except ValueError as error:
        assert "linear_attention_decode: out" in str(error)
    else:
        assert (got - want).abs().max() < 1e-5, f"out is {name}: silently wrong"
