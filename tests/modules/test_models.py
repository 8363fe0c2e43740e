"""Stacks, language models, caches and generation."""

import copy

import pytest
import torch

from linattn_tl.modules import Cache, HybridStack, KVState, Sampling, generate, prefill
from tests.modules.models import HEADS, PATTERNS, WIDTH, error, model_of, stepped, truth

every_pattern = pytest.mark.parametrize("pattern", PATTERNS)
LENGTHS = (9, 2, 6)


def ids_of(*size, seed=1):
    return torch.randint(50, size, generator=torch.Generator().manual_seed(seed))


# ---- one function, whichever way it is computed


@every_pattern
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_whole_the_segments_and_the_steps_agree(pattern, dtype):
    """R17 through a model: 200 tokens at once, in segments, and one by one."""
    model = model_of(pattern, dtype=getattr(torch, dtype))
    ids = ids_of(2, 200)
    cap = {"float32": 1e-4, "bfloat16": 2e-2}[dtype]
    exact = truth(model, ids)
    with torch.no_grad():
        whole = model(ids).logits
        cache, parts = None, []
        for piece in ids.split((1, 3, 64, 65, 67), 1):
            logits, _, cache = model(piece, cache, keep_state=True)
            parts.append(logits)
    for found in (whole, torch.cat(parts, 1), stepped(model, ids)):
        assert error(found, exact) < cap
    assert cache.lengths.tolist() == [200, 200]


@every_pattern
def test_a_padded_batch_equals_its_sequences(pattern):
    model, T = model_of(pattern), max(LENGTHS)
    rows = [ids_of(n, seed=n) for n in LENGTHS]
    for left in (False, True):
        ids, mask = torch.zeros(3, T, dtype=torch.int64), torch.zeros(3, T, dtype=torch.bool)
        for i, row in enumerate(rows):
            where = slice(T - len(row), T) if left else slice(0, len(row))
            ids[i, where], mask[i, where] = row, True
        logits, loss, cache = model(ids, targets=ids, mask=mask, keep_state=True)
        alone = [model(row.unsqueeze(0), targets=row.unsqueeze(0)) for row in rows]
        assert error(logits[mask], torch.cat([found.logits[0] for found in alone])) < 1e-5
        wanted = sum(found.loss * n for found, n in zip(alone, LENGTHS, strict=True)) / sum(LENGTHS)
        torch.testing.assert_close(loss, wanted)
        assert cache.lengths.tolist() == list(LENGTHS)


@pytest.mark.parametrize("pattern", ["L", "S"])
def test_learned_positions_count_from_each_sequence_s_start(pattern):
    model = model_of(pattern, positions=16)
    rows = [ids_of(n, seed=n) for n in LENGTHS]
    packed = torch.cat(rows).unsqueeze(0)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    alone = torch.cat([model(row.unsqueeze(0)).logits for row in rows], 1)
    assert error(model(packed, cu_seqlens=cu_seqlens).logits, alone) < 1e-5
    ids = ids_of(2, 16)
    assert error(stepped(model, ids), model(ids).logits) < 1e-5
    with pytest.raises(ValueError, match="CausalLM: a sequence has 17 tokens; expected at most 16"):
        model(ids_of(1, 17))
    with torch.no_grad(), pytest.raises(ValueError, match="a sequence has 17 tokens"):
        model.step(ids[:, 0], model(ids, keep_state=True).cache)


def test_targets_of_minus_100_do_not_count():
    model, ids = model_of("L"), ids_of(2, 12)
    targets = ids_of(2, 12, seed=2)
    targets[:, :7] = -100
    logits, loss, _ = model(ids, targets=targets)
    wanted = torch.nn.functional.cross_entropy(logits[:, 7:].flatten(0, 1), targets[:, 7:].flatten())
    torch.testing.assert_close(loss, wanted)


def test_it_starts_near_uniform_also_when_made_without_memory():
    made = model_of("LMNS", device="meta").to_empty(device="cpu")
    for p in made.parameters():
        torch.nn.init.constant_(p, float("nan"))
    made.reset_parameters()
    for model in (model_of("LMNS"), made):
        loss = model(ids_of(4, 64), targets=ids_of(4, 64, seed=2)).loss.item()
        assert abs(loss - torch.tensor(50.0).log().item()) < 0.1
        sizes = {name: p.std().item() for name, p in model.named_parameters() if name.endswith("out.weight")}
        assert max(sizes.values()) < 1.3 * (3 * 8 * WIDTH) ** -0.5  # uniform, over the root of 8 residuals


def test_a_batch_without_targets_has_no_loss():
    model, ids = model_of("L"), ids_of(2, 12)
    loss = model(ids, targets=torch.full_like(ids, -100)).loss
    loss.backward()
    assert loss.item() == 0
    assert not any(p.grad.any() for p in model.parameters())


def test_logits_of_the_last_token_alone():
    model, ids = model_of("NS"), ids_of(2, 9)
    mask = torch.arange(9) < torch.tensor([[4], [9]])
    whole = model(ids).logits
    assert error(model(ids, last_only=True).logits, whole[:, -1]) < 1e-6
    assert error(model(ids, mask=mask, last_only=True).logits, whole[[0, 1], [3, 8]]) < 1e-5
    with pytest.raises(ValueError, match="last_only with a sequence of no tokens"):
        model(ids, mask=mask & (torch.arange(2) == 1)[:, None], last_only=True)
    with pytest.raises(ValueError, match="targets is given with last_only"):
        model(ids, targets=ids, last_only=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_tokens_of_any_integer(dtype):
    model, ids = model_of("L"), ids_of(2, 12)
    found = model(ids.to(dtype), targets=ids.to(dtype))
    assert torch.equal(found.loss, model(ids, targets=ids).loss)
    assert torch.equal(generate(model, ids[0].to(dtype), 3), generate(model, ids[0], 3))


def test_generation_under_autocast():
    model, prompts = model_of("LNDS"), [ids_of(n, seed=n) for n in LENGTHS]
    with torch.autocast("cpu", torch.bfloat16):
        made = generate(model, prompts, 6, prefill_chunk=4)
    assert [len(tokens) for tokens in made] == [6, 6, 6]


def test_gradients_of_a_hybrid_are_those_of_float64():
    model, ids = model_of("NLDS"), ids_of(2, 80)
    exact = copy.deepcopy(model).double()
    model(ids, targets=ids).loss.backward()
    exact(ids, targets=ids).loss.backward()
    for (name, p), wanted in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert error(p.grad, wanted.grad) < 5e-5, name


def test_compiled_as_one_graph_for_any_length():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = model_of("LNDS", positions=100)
    compiled = torch.compile(model, fullgraph=True)
    for T in (32, 48, 80, 33, 65):
        ids = ids_of(2, T)
        found, wanted = compiled(ids, targets=ids), model(ids, targets=ids)
        assert error(found.logits, wanted.logits) < 1e-5
        grads = torch.autograd.grad(found.loss, list(model.parameters()))
        exact = torch.autograd.grad(wanted.loss, list(model.parameters()))
        assert max(error(a, b) for a, b in zip(grads, exact, strict=True)) < 1e-4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_compiled_steps_of_linear_layers():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = model_of("LNGM")
    cache, wanted = model.init_state(2), model.init_state(2)
    compiled = torch.compile(model.step, fullgraph=True)
    with torch.no_grad():
        for ids in ids_of(12, 2):
            assert error(compiled(ids, cache), model.step(ids, wanted)) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_it_can_be_sharded(tmp_path):
    """FSDP over one process: parameters are split, forward and backward give what they gave."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch has no gloo")
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    model, ids = model_of("LNMS"), ids_of(2, 20)
    whole = copy.deepcopy(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for block in model.stack.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        found, wanted = model(ids, targets=ids), whole(ids, targets=ids)
        found.loss.backward()
        wanted.loss.backward()
        assert error(found.logits, wanted.logits) < 1e-6
        for p, exact in zip(model.parameters(), whole.parameters(), strict=True):
            assert error(p.grad.full_tensor(), exact.grad) < 1e-5
        for module in (*model.stack.blocks, model):
            register_fsdp_forward_method(module, "step")
        assert torch.equal(generate(model, ids, 4)[0], generate(whole, ids, 4)[0])
    finally:
        dist.destroy_process_group()


def test_a_pattern_is_repeated_over_the_layers():
    stack = HybridStack(WIDTH, HEADS, "NNNS", 6)
    assert stack.pattern == "NNNSNN"
    assert [type(block.layer).__name__ for block in stack.blocks] == [
        {"N": "GatedDeltaNet", "S": "SoftmaxAttention"}[x] for x in "NNNSNN"
    ]


# ---- caches


def filled(pattern="LNDS", lengths=LENGTHS):
    """A model, its cache after prompts of several lengths, and the logits that come next."""
    model = model_of(pattern)
    logits, cache = prefill(model, [ids_of(n, seed=n) for n in lengths])
    return model, logits, cache


def after(model, cache, token=7):
    with torch.no_grad():
        return model.step(torch.full((cache.batch,), token), cache)


@pytest.mark.parametrize("pattern", ["LNDS", "S", "GM"])
def test_rows_of_a_cache_are_copied_left_out_and_joined(pattern):
    model, _, cache = filled(pattern)
    wanted = after(model, cache.clone())
    beams = cache.clone()
    beams.reorder([2, 2, 0])
    assert beams.lengths.tolist() == [6, 6, 9]
    assert error(after(model, beams), wanted[[2, 2, 0]]) < 1e-6
    some = cache.select([1])
    assert some.batch == 1
    both = cache.select(torch.tensor([2])).joined(some).joined(cache.select([0]))
    assert both.lengths.tolist() == [6, 2, 9]
    assert error(after(model, both), wanted[[2, 1, 0]]) < 1e-6
    assert error(after(model, some), wanted[1:2]) < 1e-6
    assert error(after(model, cache), wanted) == 0  # nothing above wrote to it


def test_a_cache_on_disk(tmp_path):
    model, _, cache = filled()
    path = tmp_path / "cache.pt"
    cache.save(path)
    restored = Cache.load(path)
    assert restored.nbytes == cache.nbytes
    assert torch.equal(after(model, restored), after(model, cache))
    torch.save({"weights": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"Cache.load: .*cache.pt is no cache of format 1"):
        Cache.load(path)


def test_a_cache_on_another_device_keeps_its_dtypes():
    cache = filled()[2]
    assert cache.to("cpu") is cache
    moved = cache.to("meta")
    assert moved.layers[3].longest == max(LENGTHS)
    assert all(
        x.dtype == y.dtype
        for a, b in zip(moved.layers, cache.layers, strict=True)
        for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True)
    )
    with pytest.raises((TypeError, RuntimeError)):
        cache.to(torch.bfloat16)


def test_bytes_of_a_cache():
    model = model_of("LS")
    cache = model.init_state(3, room=100)
    linear = 3 * 4 * (HEADS * 16 * 16 + HEADS * 16 + 3 * 3 * WIDTH)  # kv, z, and the convolution's
    softmax = 3 * 4 * 2 * WIDTH * 100 + 3 * 8
    assert cache.nbytes == linear + softmax + 3 * 8


def test_room_grows_with_the_tokens_and_a_linear_state_does_not():
    model = model_of("LS")
    cache = model.init_state(2)
    sizes = []
    for token in ids_of(70, 2):
        with torch.no_grad():
            model.step(token, cache)
        linear, softmax = cache.layers
        sizes.append(linear.nbytes)
        assert isinstance(softmax, KVState)
        assert softmax.lengths.tolist() == [softmax.longest] * 2
    assert len(set(sizes)) == 1
    assert softmax.room == 128


def test_room_can_be_reserved():
    model = model_of("LS")
    with torch.no_grad():
        cache = model(ids_of(2, 10), keep_state=True).cache
        cache.reserve(30)
        rows = cache.layers[1].k
        wanted = stepped(model, ids_of(2, 30, seed=2), model(ids_of(2, 10), keep_state=True).cache)
        assert error(stepped(model, ids_of(2, 30, seed=2), cache), wanted) < 1e-6
    assert cache.layers[1].k is rows
    assert cache.layers[1].room == 40


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.reorder([0, 1]), "Cache.reorder: rows has 2 entries; expected one a sequence, 3"),
        (lambda c: c.reorder([0, 1, 3]), "Cache.reorder: rows has 3; expected 0 to 2"),
        (lambda c: c.select([-1]), "Cache.select: rows has -1; expected 0 to 2"),
        (lambda c: c.joined(model_of("SL").init_state(1)), "other has layers kv, recurrent; expected"),
        (lambda c: c.joined(model_of("GNDS").init_state(1)), "Cache: a layer has kv, z, conv, the other kv, conv"),
    ],
)
def test_rows_that_are_not_there_are_refused(call, message):
    cache = filled()[2]
    with pytest.raises(ValueError, match=message):
        call(cache)


def test_rows_are_integers():
    cache = filled()[2]
    for rows in ([True, False, True], torch.tensor([True, False, True]), [0.9, 2.2]):
        with pytest.raises(TypeError, match=r"Cache.select: rows has dtype torch.\w+; expected integers"):
            cache.select(rows)
    assert cache.select([]).batch == 0


def test_a_cache_of_another_model_is_refused():
    model, _, cache = filled()
    with pytest.raises(ValueError, match="HybridStack: cache has 3 sequences; expected 2"):
        model(ids_of(2, 4), cache)
    with torch.no_grad(), pytest.raises(ValueError, match="HybridStack: cache has 3 sequences; expected 2"):
        model.step(ids_of(2), cache)
    with pytest.raises(ValueError, match="HybridStack: cache has 4 layers; expected 2"):
        model_of("L")(ids_of(3, 4), cache)
    with pytest.raises(TypeError, match="LinearAttention: state is KVState; expected RecurrentState"):
        model_of("LNDS")(ids_of(3, 4), model_of("SNDL").init_state(3))
    with pytest.raises(TypeError, match="HybridStack: cache is list; expected Cache"):
        model(ids_of(2, 4), [1, 2])


# ---- generation


def greedy_again(model, prompt, count):
    """Greedy tokens by reading everything again for each."""
    ids = prompt.unsqueeze(0)
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :]


@every_pattern
@pytest.mark.parametrize("chunk", [4, 2048])
def test_prompts_of_unequal_length_are_continued_as_alone(pattern, chunk):
    model = model_of(pattern)
    prompts = [ids_of(n, seed=n) for n in LENGTHS]
    made = generate(model, prompts, 12, prefill_chunk=chunk)
    for prompt, tokens in zip(prompts, made, strict=True):
        assert torch.equal(tokens, greedy_again(model, prompt, 12))


def test_forms_of_a_prompt():
    model, prompt = model_of("L"), ids_of(5)
    wanted = generate(model, prompt, 4)
    assert wanted.shape == (4,) and wanted.dtype is torch.int64
    assert torch.equal(generate(model, prompt.tolist(), 4), wanted)
    for several in ([prompt.tolist()], [prompt], prompt.unsqueeze(0)):
        (found,) = generate(model, several, 4)
        assert torch.equal(found, wanted)
    assert generate(model, prompt, 0).tolist() == []


def test_a_stop_token_ends_its_sequence_alone():
    model = model_of("NS")
    prompts = [ids_of(n, seed=n) for n in LENGTHS]
    free = generate(model, prompts, 10)
    stop = next(int(t) for t in free[0][1:] if int(t) not in free[1])
    for tokens, whole in zip(generate(model, prompts, 10, stop=stop), free, strict=True):
        at = whole.tolist().index(stop) + 1 if stop in whole else 10
        assert torch.equal(tokens, whole[:at])
    for same in (torch.tensor([stop]), torch.tensor(stop), [torch.tensor(stop)], (stop,)):
        assert torch.equal(generate(model, prompts, 10, stop=same)[0], generate(model, prompts, 10, stop=stop)[0])
    streamed = list(generate(model, prompts, 10, stop=[stop], stream=True))
    assert streamed[0] == [int(t[0]) for t in free]
    assert streamed[-1][0] is None


def test_streams_yield_at_once():
    model, prompt = model_of("L"), ids_of(5)
    calls = []
    model.stack.blocks[0].register_forward_hook(lambda *_: calls.append("prompt"))
    stream = generate(model, prompt, 4, stream=True)
    assert calls == []
    first = next(stream)
    assert calls == ["prompt"]
    assert [first, *stream] == generate(model, prompt, 4).tolist()


def test_nothing_is_computed_twice():
    """The prompt once, in pieces; then no forward at all."""
    model, seen = model_of("LS"), []
    model.register_forward_hook(lambda _, args, output: seen.append(args[0].numel()))
    generate(model, ids_of(10), 8, prefill_chunk=4)
    assert seen == [4, 4, 2]


def test_sampling_follows_the_probabilities():
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    generator = torch.Generator().manual_seed(0)

    def share(**options):
        picked = Sampling(**options).pick(logits.expand(20000, -1), generator)
        return picked.bincount(minlength=4) / 20000

    torch.testing.assert_close(share(temperature=1.0), logits[0].exp(), rtol=0, atol=0.02)
    torch.testing.assert_close(share(temperature=0.5), logits[0].mul(2).softmax(0), rtol=0, atol=0.02)
    torch.testing.assert_close(share(temperature=1.0, top_k=2), torch.tensor([0, 0, 3 / 7, 4 / 7]), rtol=0, atol=0.02)
    torch.testing.assert_close(share(temperature=1.0, top_p=0.6), torch.tensor([0, 0, 3 / 7, 4 / 7]), rtol=0, atol=0.02)
    assert share(temperature=1.0, top_p=1e-6).tolist() == [0, 0, 0, 1]
    assert share().tolist() == share(temperature=1e-40).tolist() == [0, 0, 0, 1]


def test_top_k_keeps_k_of_equals():
    kept = Sampling(temperature=1.0, top_k=2).kept(torch.zeros(1, 5))
    assert kept.isfinite().sum() == 2


def test_generators_make_runs_repeatable():
    model, prompt = model_of("D"), ids_of(5)
    made = [
        generate(model, prompt, 20, temperature=1.0, generator=torch.Generator().manual_seed(s)).tolist()
        for s in (1, 1, 2)
    ]
    assert made[0] == made[1] != made[2]


def test_a_bar_is_shown_on_stderr(capsys):
    pytest.importorskip("tqdm")
    generate(model_of("L"), ids_of(3), 3, progress=True)
    assert "generating" in capsys.readouterr().err
    generate(model_of("L"), ids_of(3), 3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("prompt", "options", "error_type", "message"),
    [
        ([], {}, ValueError, "generate: prompt is empty; expected at least one token"),
        ([[1, 2], []], {}, ValueError, r"generate: prompt\[1\] has shape \(0,\); expected \[T\]"),
        (torch.zeros(2, 0, dtype=torch.int64), {}, ValueError, r"prompt\[0\] has shape \(0,\)"),
        (torch.zeros(1, 2, 3), {}, ValueError, r"prompt has shape \(1, 2, 3\); expected \[T\] or \[B, T\]"),
        ([1, 50], {}, ValueError, "prompt has token 50; expected 0 to 49"),
        ([[1], [-1]], {}, ValueError, r"prompt\[1\] has token -1; expected 0 to 49"),
        (torch.ones(3), {}, TypeError, "prompt has dtype torch.float32; expected integers"),
        ("text", {}, TypeError, "prompt is str; expected tokens"),
        ([1], {"temperature": -1}, ValueError, "temperature is -1; expected 0 or more"),
        ([1], {"temperature": float("nan")}, ValueError, "temperature is nan"),
        ([1], {"top_k": -1}, ValueError, "top_k is -1"),
        ([1], {"top_p": 0}, ValueError, "top_p is 0; expected more than 0"),
        ([1], {"prefill_chunk": 0}, ValueError, "prefill_chunk is 0"),
        ([1], {"max_new_tokens": -1}, ValueError, "max_new_tokens is -1"),
        ([1], {"stop": 50}, ValueError, "stop has token 50; expected 0 to 49"),
        ([1], {"stop": "."}, TypeError, "stop is '.'; expected a token, or several"),
        ([1], {"stop": [1.5]}, TypeError, "stop is"),
    ],
)
def test_what_cannot_be_generated_is_refused(prompt, options, error_type, message):
    with pytest.raises(error_type, match=message):
        generate(model_of("L"), prompt, **{"max_new_tokens": 2, **options})


def test_more_tokens_than_positions_are_refused_before_any_is_made():
    model = model_of("L", positions=10)
    assert len(generate(model, ids_of(7), 4)) == 4
    with pytest.raises(ValueError, match=r"max_new_tokens is 5, which makes 11 positions .* expected at most 10"):
        generate(model, ids_of(7), 5)


def test_prefill_refuses_what_generate_refuses():
    model = model_of("L")
    for prompt, chunk, message in (
        ([], 4, "prompt is empty"),
        ([[], [1]], 4, r"prompt\[0\]"),
        ([1], 0, "prefill_chunk is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            prefill(model, prompt, chunk)


@pytest.mark.parametrize(
    ("ids", "options", "error_type", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), {}, ValueError, r"CausalLM: ids has shape \(3,\); expected \[B, T\]"),
        (torch.zeros(1, 3), {}, TypeError, "ids has dtype torch.float32; expected integers"),
        (ids_of(1, 3), {"targets": ids_of(1, 4)}, ValueError, r"targets has shape \(1, 4\); expected that of ids"),
        (ids_of(2, 3), {"cu_seqlens": torch.tensor([0, 3])}, ValueError, "B = 1 for packed sequences"),
        (ids_of(1, 3), {"mask": torch.ones(1, 4, dtype=torch.bool)}, ValueError, r"mask has shape \(1, 4\)"),
    ],
)
def test_ids_that_do_not_fit_are_refused(ids, options, error_type, message):
    with pytest.raises(error_type, match=message):
        model_of("L")(ids, **options)
