"""The store against damage, competition and death."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autotune.store
from autotune.store import Entry, Store, make_key

BINARY = bytes(range(256)) * 8
KEY = make_key(kernel="some.kernel", config={"BT": 64})


def make(path: Path) -> dict[str, Any]:
    path.write_bytes(BINARY)
    return {"arch": "cpu-v4", "config": {"BT": 64}, "us": 12.5}


def never(path: Path) -> dict[str, Any]:
    raise AssertionError("the entry was whole and yet built again")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


@pytest.fixture
def entry(store: Store) -> Entry:
    return store.put(KEY, make)


def manifest_of(entry: Entry) -> Path:
    return entry.path.with_suffix(".json")


def files(store: Store) -> list[str]:
    return sorted(p.name for p in store.root.glob("bin/**/*") if p.is_file())


def test_what_was_put_is_got(store: Store, entry: Entry):
    assert entry.path == store.root / "bin" / KEY[:2] / f"{KEY}.so"
    assert entry.path.read_bytes() == BINARY
    assert entry.manifest["config"] == {"BT": 64}
    assert entry.manifest["size"] == len(BINARY)
    assert store.get(KEY) == entry
    assert store.put(KEY, never) == entry
    assert files(store) == [f"{KEY}.json", f"{KEY}.so"]


def test_a_cold_store_is_a_miss_and_stays_untouched(store: Store):
    assert store.get(KEY) is None
    assert list(store.entries()) == []
    assert not store.root.exists()


def test_a_manifest_is_what_json_makes_of_it(store: Store):
    def odd(path: Path) -> dict[str, Any]:
        make(path)
        return {"grid": (1, 2), "by_length": {10: "a", 9: "b"}}

    assert store.put(KEY, odd) == store.get(KEY)
    assert store.put(KEY, never).manifest["by_length"] == {"10": "a", "9": "b"}


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "empty": lambda data: b"",
    "one byte more": lambda data: data + b"\n",
    "noise": lambda data: os.urandom(len(data)),
    "nested": lambda data: b"[" * 100_000,
}


def assert_miss_then_rebuilt(store: Store):
    assert store.get(KEY) is None
    assert list(store.entries()) == []
    assert store.put(KEY, make).path.read_bytes() == BINARY
    assert store.get(KEY) is not None


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("suffix", [".so", ".json"])
def test_a_damaged_file_is_a_miss(store: Store, entry: Entry, suffix: str, damage: str):
    path = entry.path.with_suffix(suffix)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert_miss_then_rebuilt(store)


@pytest.mark.parametrize("suffix", [".so", ".json"])
def test_any_flipped_bit_is_a_miss(store: Store, entry: Entry, suffix: str):
    path = entry.path.with_suffix(suffix)
    whole = path.read_bytes()
    for i in range(0, len(whole), 7 if suffix == ".so" else 1):
        for bit in (0x01, 0x20) if suffix == ".json" else (0x10,):
            path.write_bytes(whole[:i] + bytes([whole[i] ^ bit]) + whole[i + 1 :])
            assert store.get(KEY) is None, (i, bit)
    path.write_bytes(whole)
    assert store.get(KEY) == entry


@pytest.mark.parametrize("suffix", [".so", ".json"])
def test_a_missing_file_is_a_miss(store: Store, entry: Entry, suffix: str):
    entry.path.with_suffix(suffix).unlink()
    assert_miss_then_rebuilt(store)


@pytest.mark.parametrize("suffix", [".so", ".json"])
def test_a_folder_in_a_files_place_is_a_miss(store: Store, entry: Entry, suffix: str):
    entry.path.with_suffix(suffix).unlink()
    entry.path.with_suffix(suffix).mkdir()
    assert store.get(KEY) is None


@pytest.mark.parametrize("text", ["{}", "null", "[1]", '{"format": 1}', '{"format": 1, "size": "x"}', "NaN"])
def test_a_foreign_manifest_is_a_miss(store: Store, entry: Entry, text: str):
    manifest_of(entry).write_text(text)
    assert_miss_then_rebuilt(store)


def test_another_format_is_a_miss(store: Store, entry: Entry, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(autotune.store, "FORMAT", autotune.store.FORMAT + 1)
    assert_miss_then_rebuilt(store)


def test_another_keys_files_are_a_miss(store: Store, entry: Entry):
    other = KEY[:2] + "0" * 62
    for suffix in (".so", ".json"):
        entry.path.with_suffix(suffix).rename(entry.path.with_name(other + suffix))
    assert store.get(other) is None


def test_a_miss_is_explained_in_the_log(store: Store, entry: Entry, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("DEBUG", "autotune.store"):
        for damaged in (BINARY[::-1], BINARY[1:]):
            entry.path.write_bytes(damaged)
            store.get(KEY)
        store.get("f" * 64)
    assert f"miss {KEY}: the binary is damaged" in caplog.text
    assert f"miss {KEY}: the binary has 2047 bytes; expected 2048" in caplog.text
    assert f"miss {'f' * 64}: no " in caplog.text


def test_a_failing_make_leaves_nothing(store: Store):
    def fail(path: Path) -> dict[str, Any]:
        path.write_bytes(BINARY)
        raise RuntimeError("g++ said no")

    with pytest.raises(RuntimeError, match="g\\+\\+ said no"):
        store.put(KEY, fail)
    assert files(store) == []
    assert store.put(KEY, make) == store.get(KEY)


def test_a_make_that_writes_nothing_is_refused(store: Store):
    with pytest.raises(FileNotFoundError):
        store.put(KEY, lambda path: {})
    with pytest.raises(ValueError, match="is empty"):
        store.put(KEY, lambda path: {"n": path.write_bytes(b"")})
    assert files(store) == []


def test_a_temp_of_a_dead_namesake_is_not_taken_for_the_binary(store: Store):
    """Process ids come again, in containers nearly always."""
    folder = store.root / "bin" / KEY[:2]
    folder.mkdir(parents=True)
    (folder / f"{KEY}.{os.getpid()}.so.tmp").write_bytes(BINARY[:100])
    with pytest.raises(FileNotFoundError):
        store.put(KEY, lambda path: {})


def test_the_disk_has_the_binary_before_the_manifest(store: Store, monkeypatch: pytest.MonkeyPatch):
    steps: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        steps.append(("fsync", "folder" if path.is_dir() else path.suffixes[-2]))
        fsync(handle)

    def note_replace(source: Path, target: Path) -> None:
        steps.append(("replace", target.suffix))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    store.put(KEY, make)
    assert steps == [
        ("fsync", ".so"),
        ("replace", ".so"),
        ("fsync", ".json"),
        ("replace", ".json"),
        ("fsync", "folder"),
    ]


@pytest.mark.parametrize("field", ["format", "key", "size", "sha256", "seal"])
def test_a_manifest_cannot_claim_the_stores_fields(store: Store, field: str):
    with pytest.raises(ValueError, match=field):
        store.put(KEY, lambda path: {**make(path), field: 1})
    assert files(store) == []


def test_entries_are_sorted_and_whole(store: Store):
    keys = sorted(make_key(i=i) for i in range(5))
    for key in keys:
        store.put(key, make)
    store.get(keys[1]).path.write_bytes(b"x")  # type: ignore[union-attr]
    assert [e.key for e in store.entries()] == [keys[0], *keys[2:]]


def test_discard(store: Store, entry: Entry):
    store.discard(KEY)
    assert store.get(KEY) is None
    assert files(store) == []
    store.discard(KEY)


def test_reading_writes_nothing(store: Store, entry: Entry, monkeypatch: pytest.MonkeyPatch):
    """Root may write what is read-only, so the proof is that nothing is opened, made or renamed."""
    before = {p: p.stat().st_mtime_ns for p in store.root.rglob("*")}
    for path in before:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(30, "Read-only file system")

    for name in ("mkdir", "replace", "unlink", "rename", "link", "utime"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr("fcntl.flock", refuse)
    try:
        assert store.get(KEY) == entry
        assert list(store.entries()) == [entry]
        assert {p: p.stat().st_mtime_ns for p in store.root.rglob("*")} == before
    finally:
        monkeypatch.undo()
        for path in before:
            path.chmod(0o755)


def test_keys():
    assert make_key(config={"BT": 64}, kernel="some.kernel") == KEY
    assert len(KEY) == 64
    assert make_key(a={"x": 1, "y": [1, None]}) == make_key(a={"y": [1, None], "x": 1})
    different = [
        make_key(a=1),
        make_key(a="1"),
        make_key(b=1),
        make_key(a=1.5),
        make_key(a=[1]),
        make_key(a=1, b=None),
    ]
    assert len(set(different)) == len(different)


# What follows runs in other processes.

PROCESS = """
import hashlib, os, signal, sys, time
from pathlib import Path
from autotune.store import Store

root, key, counter = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

def make(path):
    with counter.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    with path.open("wb") as file:
        for i in range(8):
            file.write(bytes(range(256)))
            file.flush()
            time.sleep(0.02)
    return {"by": os.getpid()}
"""


def start(code: str, store: Store, counter: Path, *args: str) -> subprocess.Popen[str]:
    source = Path(autotune.store.__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, "-S", "-c", PROCESS + code, str(store.root), KEY, str(counter), *args],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_eight_processes_build_once(store: Store, tmp_path: Path):
    counter, go = tmp_path / "counter", tmp_path / "go"
    code = """
while not Path(sys.argv[4]).exists():
    time.sleep(0.001)
entry = Store(root).put(key, make)
print(hashlib.sha256(entry.path.read_bytes()).hexdigest(), entry.manifest["by"])
"""
    processes = [start(code, store, counter, str(go)) for _ in range(8)]
    time.sleep(0.5)
    go.touch()
    answers = [process.communicate(timeout=30)[0].split() for process in processes]
    builders = counter.read_text().split()
    assert len(builders) == 1
    assert answers == [[hashlib.sha256(BINARY).hexdigest(), builders[0]]] * 8
    assert files(store) == [f"{KEY}.json", f"{KEY}.so"]


def test_killed_while_making_is_a_miss_and_frees_the_lock(store: Store, tmp_path: Path):
    counter = tmp_path / "counter"
    process = start("Store(root).put(key, make)", store, counter)
    while not counter.exists():
        time.sleep(0.005)
    process.kill()
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGKILL
    assert store.get(KEY) is None
    assert store.put(KEY, make) == store.get(KEY)
    assert files(store) == [f"{KEY}.json", f"{KEY}.so"]  # what the dead one left is gone too


def test_killed_at_any_step_is_a_miss_or_whole(store: Store, tmp_path: Path):
    """Dies before the n-th line of the store that runs during put, for every n."""
    code = """
import autotune.store
steps = int(sys.argv[4])

def step(frame, event, arg):
    global steps
    if frame.f_code.co_filename != autotune.store.__file__:
        return None
    if event == "line":
        steps -= 1
        if steps < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return step

time.sleep = lambda s: None
for n in range(steps, 10_000):
    child = os.fork()
    if child == 0:
        steps = n
        sys.settrace(step)
        Store(root / str(n)).put(key, make)
        sys.settrace(None)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        print(n)
        break
"""
    steps = int(start(code, store, tmp_path / "counter", "0").communicate(timeout=30)[0])
    assert steps > 20
    found = [Store(store.root / str(n)).get(KEY) for n in range(steps + 1)]
    whole = [entry is not None and entry.path.read_bytes() == BINARY for entry in found]
    assert whole == sorted(whole)  # misses up to the commit point, whole ever after
    assert not whole[0]
    assert whole[-1]
    for n in range(0, steps + 1, 5):
        other = Store(store.root / str(n))
        assert other.put(KEY, make) == other.get(KEY)


def test_killed_while_replacing_a_damaged_entry(store: Store, entry: Entry, monkeypatch: pytest.MonkeyPatch):
    """The old manifest must not vouch for the new binary."""
    entry.path.write_bytes(b"damaged")
    replace = os.replace

    def die_at_the_manifest(source: Path, target: Path) -> None:
        if str(target).endswith(".json"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", die_at_the_manifest)
    with pytest.raises(KeyboardInterrupt):
        store.put(KEY, lambda path: {"n": path.write_bytes(b"another build")})
    assert json.loads(manifest_of(entry).read_text())["config"] == {"BT": 64}
    assert store.get(KEY) is None
