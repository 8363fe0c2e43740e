"""The recall example: its sequences are right, the ops do with random pairs what the formulas say, a model learns."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from examples import recall
from examples.recall import IGNORED, KEYS, ONCE, REWRITTEN, Claim, Task
from examples.training import Run, train
from linattn_tl.modules import Output

EVERY_TASK = pytest.mark.parametrize("task", [Task(ONCE, 5), Task(REWRITTEN, 5), Task(ONCE, KEYS), Task(REWRITTEN, 1)])


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(recall, "PAIRS", {ONCE: (2, 4), REWRITTEN: (2,)})
    monkeypatch.setattr(recall, "BATCH_TOKENS", 128)
    monkeypatch.setattr(recall, "TESTED", 8)
    monkeypatch.setattr(recall, "MODELS", {name: recall.MODELS[name] for name in MODELS_NAMED_BY_CLAIMS})


MODELS_NAMED_BY_CLAIMS = sorted({name for claim in recall.CLAIMS for name in (claim.better, claim.worse)})


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ---- data


@EVERY_TASK
def test_the_answer_is_the_value_listed_last_for_the_key(task):
    ids, targets = recall.make_batch(task, 7, generator())
    listed = task.length - task.pairs
    assert ids.shape == targets.shape == (7, task.length)
    assert (targets[:, :listed] == IGNORED).all()
    for row, answers in zip(ids.tolist(), targets.tolist(), strict=True):
        values = dict(zip(row[:listed:2], row[1:listed:2], strict=True))
        assert answers[listed:] == [values[key] for key in row[listed:]]


@EVERY_TASK
def test_keys_are_distinct_and_each_is_written_as_often_as_the_task_says(task):
    ids, _ = recall.make_batch(task, 7, generator())
    listed = task.length - task.pairs
    for row in ids.tolist():
        keys, values, asked = row[:listed:2], row[1:listed:2], row[listed:]
        assert sorted(asked) == sorted(set(keys))
        assert all(keys.count(key) == recall.WRITES[task.kind] for key in asked)
        assert all(0 <= key < KEYS <= value < KEYS + recall.VALUES for key, value in zip(keys, values, strict=True))


def test_a_rewritten_value_is_another_one_and_writes_are_mixed():
    ids, _ = recall.make_batch(Task(REWRITTEN, 20), 7, generator())
    for row in ids.tolist():
        keys, values = row[:120:2], row[1:120:2]
        assert len(set(zip(keys, values, strict=True))) == 60
        assert len(set(keys[:20])) < 20  # not in rounds: how late a value is does not follow from its place


def test_keys_are_asked_in_another_order_than_listed():
    ids, _ = recall.make_batch(Task(ONCE, 16), 8, generator())
    assert (ids[:, :32:2] != ids[:, 32:]).any(1).all()


def test_batches_depend_on_the_seed_alone():
    first, again, other = (recall.sample_batch(generator(seed)) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert first[0].shape != other[0].shape or not torch.equal(first[0], other[0])


def test_training_and_evaluation_have_no_sequence_in_common(small, monkeypatch):
    seen, seeds = {"train": set(), "test": set()}, {"train": set(), "test": set()}
    made = recall.make_batch

    def watched(task, batch, source):
        seeds[now].add(source.initial_seed())
        ids, targets = made(task, batch, source)
        if task.pairs == 4:  # two pairs have few sequences
            seen[now].update(map(tuple, ids.tolist()))
        return ids, targets

    monkeypatch.setattr(recall, "make_batch", watched)
    model = recall.build(recall.MODELS["sums"])
    now = "train"
    train(model, recall.sample_batch, Run(steps=10))
    now = "test"
    recall.accuracies(model)
    assert len(seen["train"]) > 10 and len(seen["test"]) == recall.TESTED
    assert not seen["train"] & seen["test"]
    assert not seeds["train"] & seeds["test"]


def test_training_sees_every_task_in_batches_of_one_size(monkeypatch):
    made = []
    monkeypatch.setattr(recall, "make_batch", lambda task, batch, _: made.append((task, batch)))
    source = generator()
    for _ in range(300):
        recall.sample_batch(source)
    assert {task for task, _ in made} == set(recall.tasks())
    assert all(0.8 < task.length * batch / recall.BATCH_TOKENS <= 1 for task, batch in made)


# ---- the ops, untrained


def test_the_delta_rule_keeps_orthonormal_keys_and_rewrites_them():
    found = recall.measure_orthonormal()
    assert found["orthonormal"]["delta rule"] < recall.EXACT
    assert found["orthonormal"]["sums"] < recall.EXACT
    assert found["rewritten"]["delta rule"] < recall.EXACT
    assert found["rewritten"]["sums"] == pytest.approx(1, abs=1e-3)  # the old value, of length 1, is still there


def test_the_error_of_sums_is_that_of_the_formula_and_grows():
    found = recall.measure_untrained()
    errors = found["error"]["sums"]
    assert errors == sorted(errors)
    assert errors == pytest.approx(found["sums_expected"], rel=0.1)
    assert found["sums_expected"][-1] == pytest.approx(math.sqrt(127 / 32))
    assert found["delta_last_pair"] < recall.EXACT
    assert max(found["error"]["softmax"]) < 0.02


def test_enough_rounds_of_the_delta_rule_keep_fewer_pairs_than_dimensions():
    k, v = recall.random_pairs(4, generator())
    assert recall.relative_error(recall.repeated_delta(k, v), v) < 1e-2 < recall.relative_error(recall.delta(k, v), v)


@pytest.mark.parametrize("name", recall.MEMORIES)
def test_reading_equals_the_formula_in_float64(name):
    k, v = recall.random_pairs(12, generator())
    o = recall.MEMORIES[name](k, v).squeeze(2).double()
    expected = FORMULAS[name](k.squeeze(2).double(), v.squeeze(2).double())
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)


def normalised(k, v):
    weights = (F.elu(k) + 1) @ (F.elu(k) + 1).mT
    return weights @ v / weights.sum(-1, keepdim=True)


def written(k, v, rounds=1):
    state = torch.zeros(len(k), k.shape[2], v.shape[2], dtype=k.dtype)
    for _ in range(rounds):
        for i in range(k.shape[1]):
            missing = v[:, i] - (k[:, i, None] @ state).squeeze(1)
            state = state + k[:, i, :, None] * missing[:, None]
    return k @ state


FORMULAS = {
    "sums, normalised": normalised,
    "sums": lambda k, v: k @ k.mT @ v,
    "delta rule": written,
    f"delta rule, {recall.ROUNDS} rounds": lambda k, v: written(k, v, recall.ROUNDS),
    "softmax": lambda k, v: (k @ k.mT * k.shape[2]).softmax(-1) @ v,
}


# ---- models


def test_models_have_as_many_parameters_and_layers():
    first = recall.build(next(iter(recall.MODELS.values())))
    models = [recall.build(plan, recall.size_of(first)) for plan in recall.MODELS.values()]
    sizes = [recall.size_of(model) for model in models]
    assert max(sizes) < 1.01 * min(sizes)
    assert len({len(model.stack.blocks) for model in models}) == 1


def test_the_state_of_a_softmax_layer_is_the_longest_list():
    model = recall.build(recall.MODELS["softmax"])
    assert recall.memory_numbers(model) == 2 * 2 * recall.HEADS * recall.DIM * 192


def test_a_small_model_learns_few_pairs(monkeypatch):
    monkeypatch.setattr(recall, "KEYS", 8)
    monkeypatch.setattr(recall, "VALUES", 8)
    monkeypatch.setattr(recall, "PAIRS", {ONCE: (2, 3), REWRITTEN: (2,)})
    monkeypatch.setattr(recall, "BATCH_TOKENS", 256)
    model = recall.build(recall.MODELS["delta rule"])
    before = recall.accuracies(model)[ONCE][2]
    train(model, recall.sample_batch, Run(steps=150, learning_rate=recall.LEARNING_RATE))
    after = recall.accuracies(model)
    assert before < 0.5
    assert after[ONCE][2] > 0.9 and after[REWRITTEN][2] > 0.9


def test_accuracy_counts_the_answers_alone():
    ids, targets = recall.make_batch(Task(ONCE, 3), recall.TESTED, generator(5))
    said = targets.clamp(min=0)  # wrong wherever nothing is asked
    said[0, -1] = 0  # and for one answer

    def model(given):
        assert torch.equal(given, ids)
        return Output(F.one_hot(said, KEYS + recall.VALUES), None, None)

    assert recall.accuracy(model, Task(ONCE, 3), generator(5)) == pytest.approx(1 - 1 / (3 * recall.TESTED))


# ---- the report


@pytest.mark.parametrize(
    ("better", "worse", "verdict"), [(0.9, 0.5, "as expected"), (0.5, 0.9, "the opposite"), (0.5, 0.51, "equal")]
)
def test_what_is_not_as_the_literature_says_is_said(better, worse, verdict):
    models = {"a": {"steps": 10, "accuracy": {ONCE: {2: better}}}, "b": {"steps": 10, "accuracy": {ONCE: {2: worse}}}}
    claim = recall.judge(Claim("a", "b", ONCE, "0000.00000"), models)
    assert claim["verdict"] == verdict
    assert ("NOT" in recall.verdict_line(claim)) == (verdict != "as expected")


def test_models_with_fewer_steps_are_not_compared():
    models = {"a": {"steps": 8, "accuracy": {ONCE: {2: 0.1}}}, "b": {"steps": 10, "accuracy": {ONCE: {2: 0.9}}}}
    claim = recall.judge(Claim("a", "b", ONCE, "0000.00000"), models)
    assert "NOT COMPARED" in recall.verdict_line(claim)


def test_where_accuracy_falls():
    assert recall.falls_at({2: 1.0, 4: 0.95, 8: 0.8, 16: 0.95}) == 8
    assert recall.falls_at({2: 1.0, 4: 0.9}) is None


def test_models_are_compared_where_pairs_are_many():
    assert recall.hard_mean({2: 1.0, 4: 1.0, 8: 0.9, 16: 0.6, 32: 0.3}) == pytest.approx(0.6)


def test_every_name_has_its_own_style():
    names = {*recall.MODELS, *recall.MEMORIES}
    assert names == set(recall.STYLES)
    assert len({recall.style(name)["color"] for name in names}) == len(names)


def test_the_report_is_readable(small, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert recall.main(["--steps", "2", "--threads", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for wanted in ("right answers in %", "2'", "too few from 2", "literature", "orthonormal", "recall.png"):
        assert wanted in out
    assert all(len(line) <= 120 for line in out.splitlines() if not line.startswith("wrote"))
    assert (tmp_path / "recall.png").stat().st_size > 10_000


def test_results_as_json_and_saved(small, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    saved = tmp_path / "measured"
    args = ["--steps", "2", "--threads", "0", "--out", str(tmp_path / "out"), "--save", str(saved), "--json"]
    assert recall.main(args) == 0
    printed, kept = json.loads(capsys.readouterr().out), json.loads((saved / "recall.json").read_text())
    assert kept["models"] == printed["models"]
    assert kept["models"]["softmax"]["steps"] == 2
    assert set(kept["models"]["softmax"]["accuracy"][ONCE]) == {"2", "4"}
    assert {"command", "machine", "untrained"} <= set(kept)
    assert (saved / "recall.png").exists() and (tmp_path / "out" / "recall.png").exists()


def test_an_inexact_delta_rule_is_noticed(small, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    right = recall.delta_rule
    monkeypatch.setattr(recall, "delta_rule", lambda q, k, v, beta, **opt: right(q, k, v, 0.99 * beta, **opt))
    assert recall.main(["--steps", "1", "--threads", "1", "--out", str(tmp_path)]) == 1


@pytest.mark.parametrize("args", [["--steps", "0"], ["--seconds", "0"], ["--threads", "-1"], ["--seconds", "nan"]])
def test_bad_arguments_are_refused(args, capsys):
    with pytest.raises(SystemExit) as stopped:
        recall.main(args)
    assert stopped.value.code == 2
    assert "positive" in capsys.readouterr().err
