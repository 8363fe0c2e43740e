"""Wheels with binaries: what is in them and what is not, and that one serves calls where nothing can be compiled."""

import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.tags import parse_tag
from packaging.utils import parse_wheel_filename

import linattn_tl
from autotune import build, cuda_build, static_check, table, target, wheel
from autotune.store import Store
from linattn_tl import cli, loader, packaging, settings, trials, tuning
from tests.autotune.cuda_binaries import compiled
from tl_kernels.spec import Kernel, Problem, Target, config_dict

ROOT = Path(__file__).parents[2]
NATIVE = target.offered()[0]
SM = "sm_90a"
EXECUTED = "executed against the float64 definition"
EMULATED = "emulated: clean, and against the float64 definition"
SOURCE = "#include <string.h>\nint answer(const char* s) { return (int) strlen(s); }"
DIMS = {"K": 32, "V": 32}


def silent(phase: str, done: int, total: int) -> None:
    pass


def compile_c(out: Path, source: str, *flags: str) -> None:
    command = ["gcc", "-fPIC", "-shared", "-fno-builtin", "-x", "c", "-", "-o", str(out), "-x", "none", *flags]
    subprocess.run(command, input=source, text=True, check=True)


# ---- stores to make wheels of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_choices: None) -> Store:
    """An empty store of the user's; tables of the user's beside it, and none that are shipped."""
    monkeypatch.setenv("LINATTN_TL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "WHEEL", tmp_path / "binaries")
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped")
    return Store(tmp_path / "cache")


def kernel(name: str, device: str = "cpu") -> Kernel:
    return trials.find_kernel(f"linear_attention.{name}", device)[1]


def put(
    store: Store,
    k: Kernel,
    arch: str = NATIVE.arch,
    dtype: str = "float32",
    which: int = 0,
    verified: str = "",
    checked: bool = True,
    key: str = "",
    flags: tuple[str, ...] = (),
    edit: tuple[bytes, bytes] = (b"", b""),
    source: str = SOURCE,
    **said: Any,
) -> str:
    """Store a binary that nobody runs, as if it were that of the kernel's config number `which`; its key."""
    device = target.named(arch)
    cuda = device.device == "cuda"
    problem = build.shaping_problem(Problem(k.op, dtype, 32, 32, device.device), device)
    config = k.configs(problem, device)[which]
    key = key or build.binary_key(k, problem, config, device, checked)

    def make(path: Path) -> dict[str, Any]:
        compile_c(path, source, *flags)
        path.write_bytes(path.read_bytes().replace(*edit) if edit[0] else path.read_bytes())
        numbers = dict.fromkeys(("smem_bytes", "static_smem_bytes", "spill_bytes"), 0)
        function = {"registers": 40, "threads": 256, **numbers}
        more = {"static": DIMS, "functions": {"f": function}, "image_bytes": 1, "minimum_driver": 580}
        return {
            "kernel": k.name,
            "dtype": dtype,
            "arch": arch,
            "config": config_dict(config),
            "tilelang": build.TILELANG,
            "compiler": "gcc",
            "verified": verified or (EMULATED if cuda else EXECUTED),
            **({**more, "minimum_cuda": "13.0"} if cuda else {}),
            **said,
        }

    return store.put(key, make).key


def scan_program(dtype: str, dim: int) -> Any:
    k, problem = kernel("scan", "cuda"), Problem("linear_attention", dtype, dim, dim, "cuda")
    return k.build(problem, k.configs(problem, target.named(SM))[0])


def put_cuda(store: Store) -> str:
    """A real CUDA binary, but for the emulator's word that it is right; its key."""
    device, k = target.named(SM), kernel("scan", "cuda")
    problem = Problem("linear_attention", "float32", 32, 32, "cuda")
    config = k.configs(problem, device)[0]
    lowered, cubin = compiled(SM, scan_program, "float32", 32)

    def make(path: Path) -> dict[str, Any]:
        said = cuda_build.link(lowered, cubin, path, k.name)
        return {**said, "dtype": "float32", "static": DIMS, "config": config_dict(config), "verified": EMULATED}

    return store.put(build.binary_key(k, problem, config, device), make).key


def row(name: str, K: int, V: int, config: Any, us: float = 1.0) -> dict[str, Any]:
    return {
        "kernel": f"linear_attention.{name}", "dtype": "float32", "K": K, "V": V, "config": config_dict(config),
        "median_us": us, "gflops": 1.0,
    }  # fmt: skip


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with every float32 kernel for this CPU, and one for a GPU where one can be compiled."""
    built = Store(settings.cache_dir())  # the test run's: what is in it is found, the rest is built once
    device, found = NATIVE, []
    problem = Problem("linear_attention", "float32", 64, 64)
    needed = trials.needed_kernels(problem, device)
    for attempt in range(2):
        found = [loader.find(k, problem, device) for k in needed]
        if all(found):
            break
        assert attempt == 0, "built, and not found"
        tuning.build_best([device.arch], ["float32"])
    folder = tmp_path_factory.mktemp("family")
    for x in found:
        assert x is not None
        place = folder / x.entry.path.relative_to(built.root)
        place.parent.mkdir(parents=True, exist_ok=True)
        for suffix in (".so", ".json"):
            shutil.copy(x.entry.path.with_suffix(suffix), place.with_suffix(suffix))
    first = found[0]
    assert first is not None
    table.write_rows(
        folder / "tables" / f"{device.arch}.json",
        device.arch,
        [row("chunk_fwd", 64, 64, found_config("chunk_fwd", found))],
    )
    if not cuda_build.missing():
        put_cuda(Store(folder))
    return folder


def found_config(name: str, found: list[Any]) -> Any:
    return next(x.config for x in found if x.kernel.name == f"linear_attention.{name}")


@pytest.fixture(scope="module")
def archs() -> list[str]:
    return [NATIVE.arch] if cuda_build.missing() else [NATIVE.arch, SM]


@pytest.fixture(scope="module")
def built(family: Path, archs: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of that cache, made by the command line as a program."""
    out = tmp_path_factory.mktemp("built") / "new" / "folder"
    command = [sys.executable, "-m", "linattn_tl", "wheel", "--arch", ",".join(archs), "--out", str(out)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "LINATTN_TL_CACHE_DIR": str(family)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    (path,) = out.iterdir()
    assert done.stdout.splitlines()[-1] == f"{path}  {path.stat().st_size / 1e6:.2f} MB"
    return path


def content(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def keys(path: Path) -> list[str]:
    """Of the binaries in a wheel, sorted; each has its manifest."""
    inside = [Path(name) for name in content(path) if name.startswith("autotune/binaries/")]
    found = sorted(name.stem for name in inside if name.suffix == ".so")
    assert found == sorted(name.stem for name in inside if name.suffix == ".json")
    assert all(name.parent.name == name.stem[:2] for name in inside)
    return found


def make(tmp_path: Path, *archs: str) -> packaging.Made:
    return packaging.make_wheel(archs or [NATIVE.arch], tmp_path / "out", silent)


# ---- the wheel as an archive


def test_name_and_tag(built: Path):
    name, version, _, tags = parse_wheel_filename(built.name)
    assert (name, str(version)) == ("linattn-tl", linattn_tl.__version__)
    (tag,) = tags
    assert (tag.interpreter, tag.abi) == ("py3", "none")
    assert re.fullmatch(r"manylinux_2_\d+_x86_64", tag.platform)
    described = message_from_bytes(content(built)[f"linattn_tl-{version}.dist-info/WHEEL"])
    assert described["Wheel-Version"] == "1.0" and described["Root-Is-Purelib"] == "false"
    assert parse_tag(described["Tag"]) == tags


def test_metadata(built: Path):
    inside = content(built)
    info = {name.split(".dist-info/")[1]: data for name, data in inside.items() if ".dist-info/" in name}
    assert sorted(info) == [
        "METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt",
    ]  # fmt: skip
    described = message_from_bytes(info["METADATA"])
    assert (described["Name"], described["Version"]) == ("linattn-tl", linattn_tl.__version__)
    assert described["License-Expression"] == "MIT" and described.get_all("License-File") == ["LICENSE"]
    assert info["licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    needs = [Requirement(text) for text in described.get_all("Requires-Dist")]
    assert {r.name for r in needs if r.marker is None or r.marker.evaluate({"extra": ""})} == {"torch", "numpy"}
    assert info["entry_points.txt"].split() == b"[console_scripts] linattn-tl = linattn_tl.cli:main".split()
    assert info["top_level.txt"].split() == [b"autotune", b"linattn_tl", b"tl_kernels"]


def test_record(built: Path):
    inside = content(built)
    (record,) = (name for name in inside if name.endswith("/RECORD"))
    lines = list(csv.reader(io.StringIO(inside[record].decode())))
    assert [line[0] for line in lines] == list(inside)
    for path, digest, size in lines:
        if path == record:
            assert (digest, size) == ("", "")
        else:
            expected = base64.urlsafe_b64encode(hashlib.sha256(inside[path]).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={expected}", len(inside[path]))


def test_the_package_is_as_setuptools_would_have_it(built: Path, tmp_path: Path):
    """Of a copy of the tree, since setuptools leaves its own files in the one that it builds."""
    ignored = shutil.ignore_patterns("__pycache__", "binaries")
    for name in packaging.PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / "tree" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "tree" / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(tmp_path), str(tmp_path / "tree")], check=True, capture_output=True)
    (pure,) = tmp_path.glob("*.whl")
    chosen = ("autotune/binaries/", "autotune/tables/")
    theirs = {n: d for n, d in content(pure).items() if not n.startswith(chosen) and ".dist-info/" not in n}
    ours = {n: d for n, d in content(built).items() if not n.startswith(chosen) and ".dist-info/" not in n}
    assert sorted(ours) == sorted(theirs)
    assert ours == theirs


def test_what_running_and_editing_leave_stays_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And the binaries and tables that are there: a wheel chooses its own."""
    left = ("__pycache__/a.pyc", "data/__pycache__/b.pyc", ".b.swp", ".cache/c.py", "kept/bin/a.so", "rows/a.json")
    for name in ("__init__.py", "data/a.h", *left):
        path = tmp_path / "left_behind" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() if name.endswith(".h") else b"")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(packaging, "PACKAGES", ("left_behind",))
    monkeypatch.setattr(packaging, "BINARIES", "left_behind/kept")
    monkeypatch.setattr(packaging, "TABLES", "left_behind/rows")
    assert packaging.package_files() == {"left_behind/__init__.py": b"", "left_behind/data/a.h": b"data/a.h"}


def test_nothing_of_this_machine_is_inside(built: Path):
    with zipfile.ZipFile(built) as archive:
        entries = archive.infolist()
    assert {entry.date_time for entry in entries} == {(1980, 1, 1, 0, 0, 0)}
    assert {entry.external_attr >> 16 for entry in entries} == {0o100644}
    names = [entry.filename for entry in entries]
    assert not [n for n in names if "__pycache__" in n or n.startswith(("/", "..")) or n.endswith(".pyc")]


def test_the_same_inputs_give_the_same_bytes(
    built: Path, family: Path, archs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LINATTN_TL_CACHE_DIR", str(family))
    again = packaging.make_wheel(archs[::-1], tmp_path, silent)
    assert again.path.name == built.name
    assert again.path.read_bytes() == built.read_bytes()
    assert sorted(tmp_path.iterdir()) == [again.path]


# ---- R19: what the binaries need


def test_binaries_need_the_c_library_alone(built: Path, archs: list[str], tmp_path: Path):
    """As binutils see it, and as our own reader does: no symbol of torch or of C++'s library."""
    binaries = {name: data for name, data in content(built).items() if name.endswith(".so")}
    assert len(binaries) == 4 + (SM in archs)
    allowed = tuple(int(n) for n in re.findall(r"manylinux_(\d+)_(\d+)_", built.name)[0])
    newest = (0, 0)
    for data in binaries.values():
        path = tmp_path / "one.so"
        path.write_bytes(data)
        symbols = subprocess.run(["nm", "-D", str(path)], capture_output=True, text=True, check=True).stdout
        lines = [line.split()[-2:] for line in symbols.splitlines()]  # kind and name, after an address if it has one
        undefined = [name for kind, name in lines if kind == "U"]
        assert undefined and all(re.fullmatch(r"\w+@GLIBC_[0-9.]+", name) for name in undefined), undefined
        assert not [name for _, name in lines if re.search(r"c10|torch|^_Z|GLIBCXX|CXXABI", name)]
        dynamic = subprocess.run(["readelf", "-dW", str(path)], capture_output=True, text=True, check=True).stdout
        needed = re.findall(r"NEEDED.*\[(.+)\]", dynamic)
        assert set(needed) <= static_check.LIBRARIES and "libc.so.6" in needed
        versions = [tuple(map(int, v.split("."))) for v in re.findall(r"@GLIBC_([0-9.]+)", symbols)]
        newest = max(newest, max(versions)[:2])
        found = static_check.read_shared_object(data)
        assert found.glibc == max(versions)[:2] and list(found.needed) == needed
    assert allowed == max(newest, wheel.OLDEST_GLIBC)


@pytest.mark.parametrize(("glibc", "tag"), [((2, 0), "2_17"), ((2, 17), "2_17"), ((2, 34), "2_34")])
def test_platform_tag(glibc: tuple[int, int], tag: str):
    assert wheel.platform_tag(glibc) == f"manylinux_{tag}_x86_64"


def test_the_tag_is_that_of_the_newest_need(cache: Store, tmp_path: Path):
    put(cache, kernel("decode"))
    assert make(tmp_path).tag == "manylinux_2_17_x86_64"  # it needs next to nothing
    put(cache, kernel("chunk_fwd"), edit=(b"GLIBC_2.2.5", b"GLIBC_2.345"))
    assert make(tmp_path).tag == "manylinux_2_345_x86_64"
    put(cache, kernel("chunk_bwd_q"), edit=(b"GLIBC_2.2.5", b"GLIBC_OTHER"))  # what no tag promises stays out
    made = make(tmp_path)
    assert made.tag == "manylinux_2_345_x86_64" and made.plan.left_out == {"unfit": 1}


# ---- what goes in


def test_the_first_config_in_order_is_shipped(cache: Store, tmp_path: Path):
    second, third = (put(cache, kernel("chunk_fwd"), which=i) for i in (1, 2))
    made = make(tmp_path)
    assert keys(made.path) == [second]
    assert made.plan.left_out == {"of a slower config": 1}
    first = put(cache, kernel("chunk_fwd"))
    assert keys(make(tmp_path).path) == [first]
    assert third not in (first, second)


def test_the_tuned_config_is_shipped(cache: Store, tmp_path: Path):
    k = kernel("chunk_fwd")
    configs = k.configs(Problem(k.op, "float32", 64, 64), NATIVE)
    stored = [put(cache, k, which=i) for i in range(3)]
    path = settings.cache_dir() / "tables" / f"{NATIVE.arch}.json"
    table.write_rows(path, NATIVE.arch, [row("chunk_fwd", 64, 64, configs[1])])
    assert keys(make(tmp_path).path) == [stored[1]]
    # one for narrow heads, another for wide ones
    table.write_rows(path, NATIVE.arch, [row("chunk_fwd", 24, 24, configs[1]), row("chunk_fwd", 200, 8, configs[2])])
    assert keys(make(tmp_path).path) == sorted(stored[1:])
    # one that is best for a narrow range between others
    others = [row("chunk_fwd", K, V, configs[1]) for K in (64, 128) for V in (64, 128)]
    table.write_rows(path, NATIVE.arch, [*others, row("chunk_fwd", 72, 72, configs[2])])
    assert keys(make(tmp_path).path) == sorted(stored[1:])
    # of a config without a binary the next best is served
    cache.discard(stored[1])
    assert keys(make(tmp_path).path) == [stored[2]]


def test_what_is_shipped_is_what_a_call_finds(cache: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """For every head dim: with all that is stored, and with the wheel alone."""
    k = kernel("chunk_fwd")
    configs = k.configs(Problem(k.op, "float32", 64, 64), NATIVE)
    for i in range(len(configs)):
        put(cache, k, which=i)
    path = settings.cache_dir() / "tables" / f"{NATIVE.arch}.json"
    rows = [row("chunk_fwd", K, V, configs[i % 3]) for i, (K, V) in enumerate(((8, 100), (64, 64), (128, 32)), 1)]
    table.write_rows(path, NATIVE.arch, rows)
    dims = [(K, V) for K in range(1, 257, 15) for V in range(1, 257, 15)]

    def find_every() -> list[str]:
        found = [loader.find(k, Problem(k.op, "float32", K, V), NATIVE) for K, V in dims]
        return [x.entry.key for x in found if x is not None]

    before = find_every()
    with zipfile.ZipFile(make(tmp_path).path) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.setenv("LINATTN_TL_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(loader, "WHEEL", tmp_path / "site" / packaging.BINARIES)
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "site" / packaging.TABLES)
    assert find_every() == before and len(before) == len(dims) and len(set(before)) > 1


def test_tables_are_merged_and_the_users_come_first(cache: Store, tmp_path: Path):
    put(cache, kernel("chunk_fwd"))
    configs = kernel("chunk_fwd").configs(Problem("linear_attention", "float32", 64, 64), NATIVE)
    name = f"{NATIVE.arch}.json"
    shipped = [row("chunk_fwd", 64, 64, configs[1]), row("chunk_fwd", 128, 128, configs[1])]
    users = [row("chunk_fwd", 64, 64, configs[0], 2.0), row("decode", 8, 8, configs[2])]
    table.write_rows(table.SHIPPED / name, NATIVE.arch, shipped)
    table.write_rows(settings.cache_dir() / "tables" / name, NATIVE.arch, users)
    table.write_rows(settings.cache_dir() / "tables" / "sm_90a.json", SM, shipped)  # of an arch that is not asked for
    made = make(tmp_path)
    found = {name: data for name, data in content(made.path).items() if name.startswith("autotune/tables/")}
    assert list(found) == [f"autotune/tables/{name}"]
    (tmp_path / name).write_bytes(found[f"autotune/tables/{name}"])
    assert sorted(table.read_rows(tmp_path / name), key=table.row_key) == sorted(
        [users[0], users[1], shipped[1]], key=table.row_key
    )
    assert len(made.plan.contents[0].rows) == 3


def test_head_dims_shape_a_cuda_binary(cache: Store, tmp_path: Path):
    """So the best for each of them goes in."""
    small = put(cache, kernel("forward", "cuda"), SM, "bfloat16")
    put(cache, kernel("forward", "cuda"), SM, "bfloat16", which=1)
    k, device = kernel("forward", "cuda"), target.named(SM)
    problem = Problem(k.op, "bfloat16", 64, 64, "cuda")
    config = k.configs(problem, device)[1]
    said = {"static": {"K": 64, "V": 64}, "config": config_dict(config)}
    large = put(cache, k, SM, "bfloat16", key=build.binary_key(k, problem, config, device), **said)
    made = make(tmp_path, SM)
    assert keys(made.path) == sorted([small, large])
    assert made.plan.left_out == {"of a slower config": 1}
    # alone they serve nothing: a call needs the other kernels too
    assert f"{SM} linear_attention.scan bfloat16 K=64 V=64" in made.plan.contents[0].lacking


def test_other_architectures_stay_out(cache: Store, tmp_path: Path):
    ours, theirs = put(cache, kernel("decode")), put(cache, kernel("scan", "cuda"), SM)
    assert keys(make(tmp_path).path) == [ours]
    assert keys(make(tmp_path, SM).path) == [theirs]
    assert keys(make(tmp_path, SM, NATIVE.arch, SM).path) == sorted([ours, theirs])


def test_binaries_of_an_installed_wheel_go_into_the_next(cache: Store, tmp_path: Path):
    """Its store is read, and what is in the user's too is not counted twice."""
    one = put(Store(loader.WHEEL), kernel("decode"))
    put(cache, kernel("decode"))
    other = put(Store(loader.WHEEL), kernel("chunk_fwd"))
    made = make(tmp_path)
    assert keys(made.path) == sorted([one, other]) and not made.plan.left_out


# ---- what stays out


def test_left_out(cache: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good = put(cache, kernel("decode"))
    put(cache, kernel("chunk_fwd"), checked=False, verified="no")
    put(cache, kernel("chunk_bwd_q"), checked=False, verified="not executed: built on a machine that cannot run it")
    put(cache, kernel("decode"), which=1, checked=False)  # under a name that no call looks for
    put(cache, kernel("chunk_bwd_kv"), verified="not executed")  # under the name of one that was
    put(cache, kernel("chunk_fwd"), key="ab" * 32)  # sources have changed
    put(cache, kernel("chunk_fwd"), key="cd" * 32, config={"C": 1})  # no longer offered
    put(cache, kernel("chunk_fwd"), key="ef" * 32, kernel="linear_attention.gone")
    put(cache, kernel("chunk_fwd"), flags=("-Wl,--no-as-needed", "-lstdc++"))
    damage(cache, put(cache, kernel("decode"), dtype="float16"))
    assert cli.main(["wheel", "--arch", NATIVE.arch, "--out", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert keys(Path(report["wheel"])) == [good]
    assert report["left_out"] == {"damaged": 1, "stale": 3, "not verified": 4, "unfit": 1}
    (complaint,) = report["complaints"]
    assert re.fullmatch(
        rf"{NATIVE.arch} linear_attention.chunk_fwd float32 \w{{12}}: needs libstdc\+\+.so.6, .*", complaint
    )
    (arch,) = report["archs"]
    assert (arch["binaries"], arch["kernels"], arch["verified"]) == (1, ["linear_attention.decode"], [EXECUTED])


def damage(store: Store, key: str) -> None:
    entry = store.get(key)
    assert entry is not None
    data = bytearray(entry.path.read_bytes())
    data[len(data) // 2] ^= 1
    entry.path.write_bytes(data)


DAMAGES = {
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff"),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("suffix", [".so", ".json"])
@pytest.mark.parametrize("spoil", DAMAGES.values(), ids=DAMAGES)
def test_damaged_entries_stay_out(cache: Store, tmp_path: Path, spoil: Any, suffix: str):
    good, bad = put(cache, kernel("decode")), put(cache, kernel("chunk_fwd"))
    spoil(cache.root / "bin" / bad[:2] / f"{bad}{suffix}")
    made = make(tmp_path)
    assert keys(made.path) == [good]
    # a binary without a manifest is what a killed build leaves: nothing is damaged
    assert made.plan.left_out["damaged"] == (0 if suffix == ".json" and spoil is DAMAGES["gone"] else 1)


def test_a_cuda_binary_that_cannot_launch_stays_out(cache: Store, tmp_path: Path):
    function = {"registers": 40, "threads": 256, "smem_bytes": 300_000, "static_smem_bytes": 0, "spill_bytes": 0}
    put(cache, kernel("scan", "cuda"), SM, functions={"f": function})
    good = put(cache, kernel("carry", "cuda"), SM)
    made = make(tmp_path, SM)
    assert keys(made.path) == [good]
    assert made.plan.left_out == {"unfit": 1} and "300000 bytes of shared memory" in made.plan.complaints[0]


# ---- errors


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(["wheel", *argv]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("linattn-tl wheel: ")
    return err


def test_an_unknown_arch(cache: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    put(cache, kernel("decode"))
    message = said(capsys, "--arch", f"{NATIVE.arch},sm_75", "--out", str(tmp_path / "out"))
    assert "'sm_75'" in message and "cpu-v3" in message and "sm_120a" in message
    assert "arch is ''" in said(capsys, "--arch", "", "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_arch_without_binaries(cache: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    put(cache, kernel("decode"))
    put(cache, kernel("scan", "cuda"), "sm_80", checked=False, verified="no")
    put(cache, kernel("scan", "cuda"), "sm_80", key="ab" * 32)
    message = said(capsys, "--arch", f"{NATIVE.arch},sm_80,{SM}", "--out", str(tmp_path / "out"))
    assert "no sm_80 binary to ship (1 stale, 1 not verified); `linattn-tl build --arch sm_80` makes them" in message
    assert f"no {SM} binary to ship (none is stored); `linattn-tl build --arch {SM}` makes them" in message
    assert NATIVE.arch not in message
    assert not (tmp_path / "out").exists()


def test_a_level_that_this_cpu_has_not(
    cache: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(target, "offered", lambda: (Target("cpu-v3"),))
    message = said(capsys, "--arch", "cpu-v4", "--out", str(tmp_path / "out"))
    assert "makes them where it can be executed, on a CPU with cpu-v4" in message


def test_the_metadata_must_be_this_versions(
    cache: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    put(cache, kernel("decode"))
    installed = linattn_tl.__version__
    monkeypatch.setattr(linattn_tl, "__version__", "9.9.9")
    message = said(capsys, "--arch", NATIVE.arch, "--out", str(tmp_path / "out"))
    assert f"metadata of linattn-tl 9.9.9, and {installed} is installed" in message
    monkeypatch.setattr(metadata, "distributions", lambda **_: [])
    message = said(capsys, "--arch", NATIVE.arch, "--out", str(tmp_path / "out"))
    assert "linattn-tl 9.9.9, and it is not installed; `pip install`" in message


def test_the_metadata_is_not_that_of_a_build_in_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    info = packaging.distribution_info()
    (tmp_path / "linattn_tl.egg-info").mkdir()
    text = f"Metadata-Version: 2.4\nName: linattn-tl\nVersion: {linattn_tl.__version__}\n"
    (tmp_path / "linattn_tl.egg-info" / "PKG-INFO").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert metadata.distribution("linattn-tl").read_text("METADATA") is None  # it is found first
    assert packaging.distribution_info() == info


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        wheel.write(tmp_path, "a", "1", "any", {"a.py": b""}, {})
    assert list(tmp_path.iterdir()) == []


# ---- the command line


def test_text(cache: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    put(cache, kernel("decode"))
    put(cache, kernel("decode"), which=1)
    put(cache, kernel("scan", "cuda"), SM)
    assert cli.main(["wheel", "--arch", f"{NATIVE.arch},{SM}", "--out", str(tmp_path / "dist")]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert lines[0].split() == ["arch", "kernels", "dtypes", "binaries", "MB", "tuned", "rows"]
    assert lines[2].split()[:4] == [NATIVE.arch, "1", "float32", "1"] and lines[2].split()[-1] == "0"
    assert lines[3].split()[:4] == [SM, "1", "float32", "1"]
    assert "left out: 1 of a slower config" in lines
    assert f"lacks {SM} linear_attention.carry float32 K=32 V=32: calls that need it" in out
    (path,) = (tmp_path / "dist").iterdir()
    assert lines[-1] == f"{path}  {path.stat().st_size / 1e6:.2f} MB"
    assert max(map(len, lines[:-1])) <= 120


# ---- where nothing can be compiled

FORBIDDEN = ("tilelang", "tvm", "tvm_ffi", "tqdm", "cupy", "pytest")
CALLS = '''
import importlib.util, json, shutil, sys
import torch
import linattn_tl
from linattn_tl import cli, linear_attention, linear_attention_decode, LinearState

found = [n for n in {forbidden!r} if importlib.util.find_spec(n)]
assert not found, found
assert not any(shutil.which(n) for n in ("gcc", "g++", "cc", "c++", "nvcc", "ld"))
phi = lambda x: torch.nn.functional.elu(x) + 1

def definition(q, k, v, kv, z, eps=1e-6):
    """Token by token, float64; HV = 2 H."""
    q, k, v, kv, z = (x.double() for x in (q, k, v, kv, z))
    out = []
    for t in range(q.shape[1]):
        kv = kv + (phi(k[:, t])[..., None].repeat_interleave(2, 1) * v[:, t, :, None])
        z = z + phi(k[:, t])
        den = (phi(q[:, t]) * z).sum(-1) + eps
        o = (phi(q[:, t])[..., None].repeat_interleave(2, 1) * kv).sum(-2)
        out.append(o / den[..., None].repeat_interleave(2, 1))
    return torch.stack(out, 1), kv, z

def check(name, actual, exact):
    error = ((actual.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()).item()
    assert error < 1e-5, (name, error)

torch.manual_seed(0)
B, T, H, K, V = 2, 70, 2, 40, 24
inputs = [torch.randn(B, T, h, d, requires_grad=True) for h, d in ((H, K), (H, K), (2 * H, V))]
kv, z = torch.randn(B, 2 * H, K, V), torch.rand(B, H, K) * 3
o, state = linear_attention(*inputs, initial_state=LinearState(kv, z), output_final_state=True)
wide = [x.detach().double().requires_grad_() for x in inputs]
exact, exact_kv, exact_z = definition(*wide, kv, z)
for name, a, b in (("o", o, exact), ("kv", state.kv, exact_kv), ("z", state.z, exact_z)):
    check(name, a, b)
upstream = torch.randn_like(o)
o.backward(upstream)
exact.backward(upstream.double())
for name, a, b in zip("qkv", inputs, wide):
    check("d" + name, a.grad, b.grad)
with torch.no_grad():
    q, k, v = (torch.randn(B, h, d) for h, d in ((H, K), (H, K), (2 * H, V)))
    before = [x.clone() for x in (kv, z)]
    o = linear_attention_decode(q, k, v, LinearState(kv, z))
    exact, exact_kv, exact_z = definition(q[:, None], k[:, None], v[:, None], *before)
    for name, a, b in (("o", o, exact[:, 0]), ("kv", kv, exact_kv), ("z", z, exact_z)):
        check("decode " + name, a, b)
print(json.dumps({{
    "stats": linattn_tl.stats(),
    "backends": [linattn_tl.last_backend(n) for n in ("linear_attention", "linear_attention_decode")],
    "file": linattn_tl.__file__,
    "torch": torch.__file__,
}}))
assert cli.main(["verify"]) == 0
assert cli.main(["wheel", "--arch", {archs!r}, "--out", {out!r}]) == 0
'''


def closure(*names: str) -> set[str]:
    """Distributions that these need, and they themselves."""
    todo, found = list(names), set()
    while todo:
        name = todo.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        needs = [Requirement(text) for text in metadata.requires(name) or ()]
        todo += [r.name for r in needs if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def link_distributions(names: set[str], folder: Path) -> None:
    """Make these distributions, and no others of this interpreter's, importable from a folder."""
    folder.mkdir()
    for name in names:
        for file in metadata.files(name) or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()
    }


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with torch, numpy, what they need, and our wheel."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    link_distributions(closure("torch", "numpy"), folder / "linked")
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "linked.pth").write_text(f"{folder / 'linked'}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run([*pip, str(built)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return python


@pytest.mark.slow
def test_it_serves_calls_where_nothing_can_be_compiled(python: Path, built: Path, archs: list[str], tmp_path: Path):
    """Forward, backward and decode, out of the wheel alone; and the wheel made there is the wheel it was made of."""
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    before = snapshot(site)
    assert any(name.startswith("autotune/binaries/bin/") for name in before)
    environment = {"PATH": "", "HOME": str(home), "XDG_CACHE_HOME": str(home), "LINATTN_TL_STRICT": "1"}
    program = CALLS.format(forbidden=FORBIDDEN, archs=",".join(archs), out=str(out))
    command = [str(python), "-I", "-W", "error::ResourceWarning", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[0])
    assert report["stats"] == {"compile": 0, "tune": 0, "binary_load": 4, "fallback": 0}
    assert report["backends"] == ["binary", "binary"]
    assert Path(report["file"]).is_relative_to(site)
    assert f"\n{NATIVE.arch}" in done.stdout and "0 complaints" in done.stdout
    assert snapshot(site) == before, "something was written into the installed package"
    assert list(home.iterdir()) == []
    assert (out / built.name).read_bytes() == built.read_bytes()


def test_the_installed_store_is_whole(python: Path, built: Path, archs: list[str]):
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    entries = list(Store(site / packaging.BINARIES).entries())
    assert [e.key for e in entries] == keys(built)
    assert {e.manifest["arch"] for e in entries} == set(archs)
    (script,) = python.parent.glob("linattn-tl")
    done = subprocess.run([script, "--help"], env={"PATH": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "wheel" in done.stdout
