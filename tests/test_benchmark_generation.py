"""The benchmark of whole models: its figures follow from what it measured, and a wrong model is not timed."""

import json

import pytest
import torch

from benchmarks import generation
from examples import byte_lm


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"WIDTH": 32, "HEADS": 2, "PROMPT": 20, "NEW": 12, "EDGE": 4, "STEPS": 4}.items():
        monkeypatch.setattr(generation, name, value)
    monkeypatch.setattr(generation, "LENGTHS", (16, 64))
    monkeypatch.setattr(generation, "ROUNDS", 1)
    monkeypatch.setattr(generation, "TRAINED", {"linear": "L"})
    monkeypatch.setattr(byte_lm, "BATCH", 2)
    monkeypatch.setattr(byte_lm, "LENGTH", 64)
    text = byte_lm.as_tensor(b"for i in range(10):\n    print(i)\n" * 50)
    monkeypatch.setattr(byte_lm, "read_text", lambda: (text, text))


def test_the_report(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert generation.main(["--threads", "1", "--save", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for wanted in ("generation after 20 tokens", "growth", "softmax is slower than linear from", "torch backend"):
        assert wanted in out
    assert (tmp_path / "generation.png").stat().st_size > 1000
    assert json.loads((tmp_path / "generation.json").read_text())["command"].startswith("python -m ")


def test_numbers_for_scripts(capsys):
    assert generation.main(["--threads", "1", "--parts", "generation,steps", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sizes = {x["model"]: x["cache_mb"] for x in found["steps"]}
    assert sizes["linear"][0] == sizes["linear"][1]
    assert sizes["softmax"][0] < sizes["softmax"][1]
    assert len(found["generation"]) == len(generation.MODELS)
    assert found["training"] == []


@pytest.mark.parametrize(
    ("rival", "ours", "said"),
    [
        ([1.0, 3.0], [2.0, 2.0], "40 tokens"),
        ([3.0, 3.0], [2.0, 2.0], "16 tokens or fewer"),
        ([1.0, 1.0], [2.0, 2.0], "more than 64 tokens"),
        ([3.0, 1.0], [2.0, 2.0], "more than 64 tokens"),
    ],
)
def test_where_lines_cross(rival, ours, said):
    assert generation.crossover(rival, ours) == said


def test_a_wrong_model_is_not_timed(monkeypatch):
    right = byte_lm.make_model

    def wrong(pattern, backend):
        model = right(pattern, backend)
        if backend == "torch":
            with torch.no_grad():
                model.norm.weight.mul_(1.2)
        return model

    monkeypatch.setattr(byte_lm, "make_model", wrong)
    with pytest.raises(SystemExit, match="linear: gradients differ by"):
        generation.main(["--threads", "1", "--parts", "training"])
