"""Tuned tables: which config is tried first, and files that are old, damaged or written by two at a time."""

import json
import multiprocessing
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune import table, target
from autotune.table import merge_rows, ordered_configs, read_rows, write_rows
from tl_kernels.spec import Kernel, Problem

V4 = target.named("cpu-v4")


@dataclass(frozen=True)
class Config:
    C: int
    NR: int


OFFERED = tuple(Config(C, NR) for C in (32, 64) for NR in (16, 32, 64))
KERNEL = Kernel("imagined.fwd", lambda problem, config: None, lambda problem, target: OFFERED)


def row(K: int, V: int, config: Config | dict[str, Any], **changes: Any) -> dict[str, Any]:
    said = vars(config) if isinstance(config, Config) else config
    return {"kernel": "imagined.fwd", "dtype": "float32", "K": K, "V": V, "config": said, "median_us": 1.0, **changes}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    write_rows(path, "cpu-v4", rows)
    return path


def order(K: int, V: int, *paths: Path, dtype: str = "float32") -> list[Config]:
    return ordered_configs(KERNEL, Problem("imagined", dtype, K, V), V4, paths)


# ---- which is first


def test_without_a_table_the_kernel_decides(tmp_path: Path):
    assert order(64, 64, tmp_path / "absent.json") == list(OFFERED)
    assert order(64, 64) == list(OFFERED)


def test_the_nearest_head_dims_come_first(tmp_path: Path):
    a, b, c = OFFERED[5], OFFERED[3], OFFERED[4]
    path = write(tmp_path / "t.json", row(16, 16, a), row(64, 64, b), row(256, 256, c))
    assert order(64, 64, path)[:3] == [b, a, c]
    assert order(16, 16, path)[:3] == [a, b, c]
    assert order(200, 200, path)[:3] == [c, b, a]
    assert order(1, 1, path)[:3] == [a, b, c]


def test_nearest_is_by_ratio_and_by_both_dims(tmp_path: Path):
    """64 is as far from 128 as 32 is; what counts is how often one must double."""
    a, b = OFFERED[4], OFFERED[5]
    path = write(tmp_path / "t.json", row(16, 64, a), row(256, 64, b))
    assert order(60, 64, path)[:2] == [a, b]
    assert order(70, 64, path)[:2] == [b, a]
    path = write(tmp_path / "u.json", row(64, 16, a), row(64, 256, b))
    assert order(64, 60, path)[:2] == [a, b]
    assert order(64, 70, path)[:2] == [b, a]
    path = write(tmp_path / "v.json", row(64, 256, a), row(128, 128, b))
    assert order(64, 200, path)[:2] == [a, b]
    assert order(96, 96, path)[:2] == [b, a]


@pytest.mark.parametrize("dims", [(0, 64), (64, 0)])
def test_no_head_dims_are_as_far_from_everything(dims: tuple[int, int], tmp_path: Path):
    path = write(tmp_path / "t.json", row(64, 64, OFFERED[5]))
    assert sorted(order(*dims, path), key=OFFERED.index) == list(OFFERED)


def test_each_config_comes_once_and_none_is_lost(tmp_path: Path):
    path = write(tmp_path / "t.json", *(row(K, 64, OFFERED[5]) for K in (16, 32, 64, 128)), row(256, 256, OFFERED[2]))
    found = order(64, 64, path)
    assert found == [OFFERED[5], OFFERED[2], *(c for c in OFFERED if c not in (OFFERED[5], OFFERED[2]))]


def test_an_earlier_table_wins_even_with_a_row_further_away(tmp_path: Path):
    users = write(tmp_path / "users.json", row(256, 256, OFFERED[5]))
    shipped = write(tmp_path / "shipped.json", row(64, 64, OFFERED[4]))
    assert order(64, 64, users, shipped)[:2] == [OFFERED[5], OFFERED[4]]
    assert order(64, 64, shipped, users)[:2] == [OFFERED[4], OFFERED[5]]


def test_rows_of_other_kernels_and_dtypes_do_not_count(tmp_path: Path):
    path = write(
        tmp_path / "t.json",
        row(64, 64, OFFERED[5], kernel="imagined.bwd"),
        row(64, 64, OFFERED[4], dtype="bfloat16"),
    )
    assert order(64, 64, path) == list(OFFERED)
    assert order(64, 64, path, dtype="bfloat16")[0] == OFFERED[4]


@pytest.mark.parametrize(
    "stale", [{"C": 48, "NR": 16}, {"C": 32}, {"C": 32, "NR": 16, "stages": 2}, {}, {"C": "32", "NR": 16}]
)
def test_a_config_that_is_no_longer_offered_is_ignored(stale: dict[str, Any], tmp_path: Path):
    path = write(tmp_path / "t.json", row(64, 64, stale), row(256, 256, OFFERED[4]))
    assert order(64, 64, path) == [OFFERED[4], *OFFERED[:4], OFFERED[5]]


# ---- files


DAMAGED = {
    "empty": b"",
    "cut": b'{"arch": "cpu-v4", "rows": [\n  {"kernel": "imagi',
    "not text": b"\xff\xfe\x00rows",
    "another kind": b"[1, 2]",
    "no rows": b'{"arch": "cpu-v4"}',
    "rows are none": b'{"rows": null}',
    "a row is none": b'{"rows": [null]}',
    "a row without a key": b'{"rows": [{"kernel": "imagined.fwd", "config": {}}]}',
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_has_no_rows(text: bytes, tmp_path: Path):
    path = tmp_path / "t.json"
    path.write_bytes(text)
    assert read_rows(path) == []
    assert order(64, 64, path) == list(OFFERED)


def test_every_cut_of_a_file_is_no_rows_or_all(tmp_path: Path):
    path = write(tmp_path / "t.json", row(16, 16, OFFERED[0]), row(64, 64, OFFERED[1]))
    text = path.read_bytes()
    for n in range(len(text)):
        path.write_bytes(text[:n])
        assert len(read_rows(path)) in (0, 2)


@pytest.mark.parametrize(
    "bad", [{"K": "64"}, {"K": 0}, {"V": None}, {"config": {"C": [32], "NR": 16}}], ids=["text", "zero", "null", "list"]
)
def test_a_damaged_row_can_only_be_slow(bad: dict[str, Any], tmp_path: Path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"rows": [{**row(64, 64, OFFERED[1]), **bad}]}))
    assert order(64, 64, path)[-1] in OFFERED


def test_what_was_written_is_read_sorted(tmp_path: Path):
    rows = [
        row(64, 64, OFFERED[0]),
        row(64, 16, OFFERED[1]),
        row(16, 64, OFFERED[2]),
        row(16, 16, OFFERED[3], dtype="bfloat16"),
        row(256, 256, OFFERED[4], kernel="imagined.bwd"),
    ]
    path = write(tmp_path / "deep" / "er" / "t.json", *rows)
    assert read_rows(path) == [rows[4], rows[3], rows[2], rows[1], rows[0]]
    assert json.loads(path.read_text())["arch"] == "cpu-v4"
    assert len(path.read_text().splitlines()) == len(rows) + 2  # a row a line, for a diff
    assert write(tmp_path / "again.json", *reversed(rows)).read_bytes() == path.read_bytes()
    assert read_rows(write(tmp_path / "none.json")) == []


def test_a_write_that_fails_leaves_the_old_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "t.json", row(16, 16, OFFERED[0]))

    def fail(*_: object) -> None:
        raise OSError("no space left")

    for broken in ("replace", "write_text"):
        with monkeypatch.context() as patch:
            patch.setattr(os if broken == "replace" else Path, broken, fail)
            with pytest.raises(OSError, match="no space left"):
                write(path, row(64, 64, OFFERED[1]))
        assert [r["K"] for r in read_rows(path)] == [16]
    with pytest.raises(TypeError):
        write(path, row(64, 64, {"C": object()}))
    assert [r["K"] for r in read_rows(path)] == [16]


def _write_often(path: str, K: int) -> None:
    for _ in range(60):
        write(Path(path), *(row(K, V, OFFERED[0]) for V in range(1, 200)))


def test_two_writers_and_a_reader(tmp_path: Path):
    """A reader sees one table or the other, whole, whenever it looks."""
    path = write(tmp_path / "t.json", *(row(1, V, OFFERED[0]) for V in range(1, 200)))
    process = multiprocessing.get_context("spawn").Process(target=_write_often, args=(str(path), 2))
    thread = threading.Thread(target=_write_often, args=(str(path), 3))
    process.start()
    thread.start()
    seen = set()
    while process.is_alive() or thread.is_alive():
        rows = read_rows(path)
        assert len(rows) == 199
        kinds = {r["K"] for r in rows}
        assert len(kinds) == 1
        seen |= kinds
    process.join()
    thread.join()
    assert process.exitcode == 0
    assert {2, 3} & seen
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


# ---- merging


def test_a_new_row_replaces_the_old_one_of_its_key():
    old = [row(64, 64, OFFERED[0]), row(16, 16, OFFERED[1])]
    new = [row(64, 64, OFFERED[2]), row(64, 128, OFFERED[3])]
    assert merge_rows(old, new) == [new[0], old[1], new[1]]
    assert merge_rows(old, []) == old
    assert merge_rows([], new) == new


@pytest.mark.parametrize("change", [{"kernel": "imagined.bwd"}, {"dtype": "float16"}, {"K": 1}, {"V": 1}], ids=str)
def test_every_part_of_the_key_keeps_rows_apart(change: dict[str, Any]):
    old = row(64, 64, OFFERED[0])
    assert merge_rows([old], [{**old, **change}]) == [old, {**old, **change}]
    assert table.row_key(old) != table.row_key({**old, **change})


def test_the_speed_is_not_part_of_the_key():
    old = row(64, 64, OFFERED[0])
    assert merge_rows([old], [{**old, "median_us": 9.0, "device": "another"}])[0]["median_us"] == 9.0
