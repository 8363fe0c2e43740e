"""Models of transformers with linattn_tl.compat.transformers and without it: the same logits, gradients and tokens."""

import importlib
import inspect
import itertools
import sys
import time
from typing import Any

import pytest
import torch

from linattn_tl import last_backend
from linattn_tl.compat import transformers as compat
from linattn_tl.ops.delta_rule.definition import Options, TorchRunner, recurrent

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("binaries")
CHUNK = "torch_chunk_gated_delta_rule"


@pytest.fixture(autouse=True)
def disabled():
    yield
    compat.disable()


def qwen3_next() -> Any:
    config = transformers.Qwen3NextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=24, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, pad_token_id=0, eos_token_id=96,
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)


def qwen3_5() -> Any:
    text = importlib.import_module("transformers.models.qwen3_5.configuration_qwen3_5").Qwen3_5TextConfig
    config = text(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=24, pad_token_id=0, eos_token_id=96,
    )  # fmt: skip
    return importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5").Qwen3_5ForCausalLM(config)


MODELS = {"qwen3_next": qwen3_next, "qwen3_5": qwen3_5}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().float()


def learned(model: Any, tokens: torch.Tensor, **more: Any) -> dict[str, torch.Tensor]:
    """Logits, and the gradient of every parameter from a loss over them."""
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False, **more).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weights).sum().backward()
    return {"logits": logits.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def off(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative errors."""
    assert found.keys() == right.keys()
    return {n: ((found[n] - x).norm() / x.norm().clamp(min=1e-9)).item() for n, x in right.items()}


def exact_rule(q: Any, k: Any, v: Any, g: Any = None, beta: Any = None, **_: Any) -> tuple[torch.Tensor, None]:
    """The definition in float64, token by token."""
    wide = [x.double() for x in (q, k, v, g, beta)]
    (o, _), _ = TorchRunner(recurrent).forward((*wide, None), None, Options(q.shape[-1] ** -0.5, qk_l2norm=True))
    return o.float(), None


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch):
    """As with the rule in float64; and as theirs, whose gradients of gates lose digits, up to their own error."""
    model, tokens = made(name), torch.randint(0, 97, (2, 75), generator=torch.Generator().manual_seed(2))
    theirs = learned(model, tokens)
    with compat.enabled() as what:
        ours = learned(model, tokens)
        assert last_backend("gated_delta_rule") == "binary"
        assert any(f"models.{name}." in x for x in what.replaced)
        assert name in str(what)
    monkeypatch.setattr(sys.modules[type(model).__module__], CHUNK, exact_rule)
    for layer in model.modules():
        if hasattr(layer, "chunk_gated_delta_rule"):  # before 5.1
            layer.chunk_gated_delta_rule = exact_rule
    exact = learned(model, tokens)
    assert any("linear_attn.A_log" in n for n in exact)
    their_errors, distance = off(theirs, exact), off(ours, theirs)
    for n, error in off(ours, exact).items():
        assert error < 2e-5, f"{n} is {error:.1e} off"
        assert distance[n] < max(2e-5, 2 * their_errors[n]), f"{n} is {distance[n]:.1e} from theirs"


@pytest.mark.parametrize("name", MODELS)
def test_greedy_generation_gives_the_same_tokens(name: str):
    model, tokens = made(name).eval(), torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(3))
    how = {"max_new_tokens": 20, "do_sample": False}
    right = model.generate(tokens, attention_mask=torch.ones_like(tokens), **how)
    compat.enable()
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **how)
    assert last_backend("gated_delta_rule_decode") == "binary"
    assert torch.equal(found, right)


@pytest.mark.parametrize("said", [("cu", "index"), ("cu",), ("index",)])
@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences_are_as_alone(name: str, said: tuple[str, ...]):
    """The convolution too keeps them apart; transformers by itself refuses, or lets them leak."""
    model, lengths = made(name), (3, 40, 1, 30)
    layer = next(x for n, x in model.named_modules() if n.endswith("linear_attn"))
    if "kwargs" not in inspect.signature(layer.forward).parameters:
        pytest.skip("this version does not tell its layers where sequences begin")
    tokens = torch.randint(0, 97, (1, sum(lengths)), generator=torch.Generator().manual_seed(4))
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    more: dict[str, Any] = {"position_ids": torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)}
    if "cu" in said:
        longest = max(lengths)
        more |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}
    if "index" in said:
        more["seq_idx"] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).unsqueeze(0)
    with compat.enabled():
        packed = model(input_ids=tokens, use_cache=False, **more).logits
    alone = [model(input_ids=tokens[:, a:b], use_cache=False).logits for a, b in itertools.pairwise(cu)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=2e-4)


def convolved(x: torch.Tensor, **kwargs: Any) -> list[float]:
    """By the convolution that keeps sequences apart: one channel, four taps of 1."""
    own = compat._apart(lambda *_, **__: pytest.fail("transformers' own was called"))
    return own(x.view(1, 1, -1), torch.ones(1, 4), **kwargs).flatten().tolist()


def test_columns_that_a_cache_has_put_in_front_belong_to_the_first_sequence():
    past = torch.tensor([1.0, 2, 3, 4, 5, 6, 7])
    cu = torch.tensor([0, 3], dtype=torch.int32)
    assert convolved(past, cu_seq_lens_q=cu)[-3:] == [14, 18, 22]
    assert convolved(past, seq_idx=torch.tensor([[0, 0, 1]]))[-3:] == [14, 18, 7]
    padded = torch.tensor([0.0, 0, 10, 1])  # two tokens, each a sequence, before which a new cache has put zeros
    assert convolved(padded, cu_seq_lens_q=torch.tensor([0, 1, 2]))[-2:] == [10, 1]


def test_a_step_has_a_gradient_of_its_state():
    torch.manual_seed(0)
    q, k, v, g, beta = (torch.randn(1, 1, 2, *width) for width in ((8,), (8,), (8,), (), ()))
    state = torch.randn(1, 2, 8, 8, requires_grad=True)
    right = compat._chunk(q, k, v, -g.abs(), beta.sigmoid(), initial_state=state, output_final_state=True)
    found = compat._step(q, k, v, -g.abs(), beta.sigmoid(), initial_state=state, output_final_state=True)
    for x, y in zip(found, right, strict=True):
        assert x is not None and y is not None and x.requires_grad
        torch.testing.assert_close(x, y)


def test_packed_rows_are_refused():
    q = torch.randn(2, 6, 2, 8)
    with pytest.raises(ValueError, match=r"seq_idx has shape \(2, 6\); expected \[1, T\]"):
        compat._chunk(q, q, q, q[..., 0], q[..., 0], seq_idx=torch.zeros(2, 6))


def test_disable_gives_everything_back():
    module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    before = dict(vars(module))
    what = compat.enable()
    assert compat.enable() is what
    assert getattr(module, CHUNK) is not before[CHUNK]
    compat.disable()
    assert dict(vars(module)) == before
    with compat.enabled(), compat.enabled():
        pass
    assert dict(vars(module)) == before


def old_module() -> Any:
    """As in 4.57: layers take the functions when they are made."""
    module = type(sys)("transformers.models.qwen3_old.modeling_qwen3_old")

    class Qwen3OldGatedDeltaNet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chunk_gated_delta_rule = module.chunk_gated_delta_rule or module.torch_chunk_gated_delta_rule
            self.recurrent_gated_delta_rule = module.torch_recurrent_gated_delta_rule

    Qwen3OldGatedDeltaNet.__module__ = module.__name__
    module.chunk_gated_delta_rule = None
    module.torch_chunk_gated_delta_rule = lambda: "chunk"
    module.torch_recurrent_gated_delta_rule = lambda: "step"
    module.Qwen3OldGatedDeltaNet = Qwen3OldGatedDeltaNet
    return module


def test_layers_that_hold_the_functions_themselves():
    """Those made before, and those made meanwhile, which have their own again afterwards."""
    module = old_module()
    before = module.Qwen3OldGatedDeltaNet()
    compat._replace(module)
    meanwhile = module.Qwen3OldGatedDeltaNet()
    for layer in (before, meanwhile):
        assert layer.chunk_gated_delta_rule is compat._chunk and layer.recurrent_gated_delta_rule is compat._step
    compat.disable()
    for layer in (before, meanwhile):
        assert layer.chunk_gated_delta_rule() == "chunk" and layer.recurrent_gated_delta_rule() == "step"


def test_without_transformers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"transformers is not installed; expected 4\.57"):
        compat.enable()


def test_a_version_without_the_functions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compat, "_modules", lambda: [])
    with pytest.raises(ImportError, match=rf"has no model with {CHUNK} that can be served; expected 4\.57"):
        compat.enable()


def test_a_module_with_half_of_the_functions_is_named():
    module = old_module()
    del module.torch_recurrent_gated_delta_rule
    with pytest.raises(ImportError, match=r"it has torch_chunk_gated_delta_rule and no torch_recurrent"):
        compat._replace(module)


def test_a_module_that_cannot_be_served_does_not_keep_others_from_it(monkeypatch: pytest.MonkeyPatch):
    own = compat._modules()
    monkeypatch.setattr(compat, "_modules", lambda: ["transformers.models.none.modeling_none", *own])
    what = compat.enable()
    assert what.replaced and [why.split(":")[0] for why in what.skipped] == ["transformers.models.none.modeling_none"]
    assert "not of transformers.models.none.modeling_none: No module named" in str(what)


@pytest.mark.timing
def test_a_prompt_is_read_faster():
    model = made("qwen3_5").eval()
    tokens = torch.randint(0, 97, (1, 1024))
    times: dict[bool, list[float]] = {True: [], False: []}
    with torch.no_grad():
        for turn in range(6):
            ours = bool(turn % 2)
            if ours:
                compat.enable()
            else:
                compat.disable()
            model(input_ids=tokens, use_cache=False)
            start = time.perf_counter()
            model(input_ids=tokens, use_cache=False)
            times[ours].append(time.perf_counter() - start)
    assert min(times[True]) < min(times[False])
