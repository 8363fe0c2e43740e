"""The examples: the byte model learns and generates from its state alone, and the demo notices a wrong op."""

import json
import sysconfig

import pytest
import torch

import linattn_tl
from examples import byte_lm, demo, training


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(byte_lm, "BATCH", 2)
    monkeypatch.setattr(byte_lm, "LENGTH", 64)
    monkeypatch.setattr(byte_lm, "GENERATE", 40)
    monkeypatch.setattr(byte_lm, "VALID_BATCHES", 2)
    monkeypatch.setattr(byte_lm, "read_text", lambda: (TEXT, TEXT[: len(TEXT) // 2]))
    torch.set_num_threads(1)


TEXT = byte_lm.as_tensor(b"for i in range(10):\n    print(i)\n" * 50)


def test_it_learns_and_the_state_is_all_it_needs(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert byte_lm.main(["--steps", "40", "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["losses"]) == 40
    assert sum(found["losses"][-5:]) < 0.5 * sum(found["losses"][:5])
    assert found["valid_bits_per_byte"] < 4
    assert found["same_bytes"]
    assert found["max_difference"] <= byte_lm.TOLERANCE
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_the_report_is_readable(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert byte_lm.main(["--steps", "3", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for wanted in ("validation:", "bytes/s", "A KV cache", "the same bytes", "served: linear_attention"):
        assert wanted in out


def test_runs_are_repeatable(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    losses = []
    for _ in range(2):
        byte_lm.main(["--steps", "3", "--threads", "1", "--dtype", "float32", "--out", str(tmp_path), "--json"])
        losses.append(json.loads(capsys.readouterr().out)["losses"])
    assert losses[0] == losses[1]


def test_models_of_one_size_are_compared(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert byte_lm.main(["--compare", "--steps", "4", "--save", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    saved = json.loads((tmp_path / "byte_lm.json").read_text())
    assert (tmp_path / "byte_lm.png").stat().st_size > 1000
    assert saved["command"].startswith("python -m ")
    assert saved["machine"]["torch"] == torch.__version__
    assert list(saved["models"]) == list(byte_lm.COMPARED)
    sizes = [x["parameters"] for x in saved["models"].values()]
    assert max(sizes) < 1.002 * min(sizes)
    assert all(len(x["losses"]) == 4 for x in saved["models"].values())
    assert "3:1 hybrid   NNNS" in out
    assert "published" in out


def test_what_is_said_follows_from_the_order():
    assert "As published" in byte_lm.said_of_order(["3:1 hybrid", "gated delta", "gated", "delta", "linear"])
    said = byte_lm.said_of_order(["3:1 hybrid", "linear", "gated delta", "gated", "delta"])
    assert said.startswith("Not as published")
    assert "gated delta not before linear" in said
    assert "hybrid" not in said


def test_the_curve_is_a_mean():
    steps, means = byte_lm.smoothed([1.0] * byte_lm.SMOOTH + [3.0])
    assert means == [1.0, 3.0]
    assert steps == [byte_lm.SMOOTH / 2, byte_lm.SMOOTH + 0.5]


@pytest.mark.parametrize("pattern", ["L", "NNNS"])
def test_memory_grows_with_softmax_layers_alone(pattern):
    model = byte_lm.make_model(pattern)
    sizes = {byte_lm.generate(model, TEXT[:10], n).cache.nbytes for n in (1, 100)}
    assert (len(sizes) == 1) == (pattern == "L")


def test_a_state_that_forgets_is_noticed(monkeypatch):
    model = byte_lm.make_model()
    right = byte_lm.CausalLM.step

    def forgetful(self, ids, cache):
        cache.layers[0].kv.mul_(0.9)
        return right(self, ids, cache)

    assert byte_lm.compare_with_rerun(model, byte_lm.generate(model, TEXT[:1], 10)) < (byte_lm.TOLERANCE, True)
    monkeypatch.setattr(byte_lm.CausalLM, "step", forgetful)
    with torch.no_grad():
        model.stack.blocks[0].layer.out.weight.mul_(100)
    assert byte_lm.compare_with_rerun(model, byte_lm.generate(model, TEXT[:30], 10))[0] > byte_lm.TOLERANCE


def test_the_fastest_setting_is_among_those_asked_for():
    model = byte_lm.make_model()

    def sample(generator):
        return byte_lm.sample_batch(TEXT, generator)

    assert training.fastest_setting(model, sample, 1, "bfloat16") == (1, "bfloat16")
    found = training.fastest_setting(model, sample)
    assert found.threads == torch.get_num_threads()
    assert found.dtype in ("float32", "bfloat16")
    assert all(p.grad is None for p in model.parameters())


def test_text_is_split_without_overlap_and_in_the_same_way_each_time(monkeypatch, tmp_path):
    monkeypatch.undo()
    for i in range(40):
        (tmp_path / f"m{i}.py").write_text(f"# file {i}\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "t.py").write_text("# a test\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    train, valid = (bytes(part.tolist()).splitlines() for part in byte_lm.read_text())
    assert (len(train), len(valid)) == (38, 2)
    assert not set(train) & set(valid)
    assert b"# a test" not in train
    assert [bytes(part.tolist()).splitlines() for part in byte_lm.read_text()] == [train, valid]


@pytest.mark.parametrize("args", [["--steps", "0"], ["--seconds", "0"]])
def test_bad_arguments_are_refused(args, capsys):
    with pytest.raises(SystemExit) as stopped:
        byte_lm.main(args)
    assert stopped.value.code == 2
    assert "positive" in capsys.readouterr().err


def test_the_demo_compares_the_ops_with_the_definition(capsys):
    assert demo.check_ops()
    assert capsys.readouterr().out.count(" ok\n") == 3


def test_the_demo_notices_a_wrong_op(monkeypatch, capsys):
    right = linattn_tl.linear_attention
    monkeypatch.setattr(linattn_tl, "linear_attention", lambda *args: (right(*args)[0] * 1.001, None))
    assert not demo.check_ops()
    assert "WRONG" in capsys.readouterr().out
