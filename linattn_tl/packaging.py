"""What is in the stores, and a wheel of this package with the binaries that its calls would be served by.

A wheel is made of the installed package, whether it is installed for good or is a source tree: the machine that builds
binaries need not have the sources apart. Who installs the wheel needs torch and numpy.
"""

import importlib
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import linattn_tl
from autotune import build, static_check, table, target, wheel
from autotune.store import Entry
from linattn_tl import loader, trials
from tl_kernels.spec import Kernel, Problem, Target

DISTRIBUTION = "linattn-tl"
PACKAGES = ("autotune", "linattn_tl", "tl_kernels")
BINARIES, TABLES = "autotune/binaries", "autotune/tables"  # where loader.WHEEL and table.SHIPPED are in a wheel
VERIFIED = ("executed", "emulated")  # how a manifest's "verified" begins if the binary was found right
# head dims for which the kernels' own order of configs is asked, besides those of tuned rows
SIDES = (16, 32, 64, 128, 256)

Progress = Callable[[str, int, int], None]  # what is being done, how many are done, of how many


# ---- what is in the stores


@dataclass(frozen=True)
class Known:
    """A stored binary in the words of this version of the package."""

    kernel: Kernel
    problem: Problem
    device: Target
    config: Any

    def key(self, checked: bool = True) -> str:
        return build.binary_key(self.kernel, self.problem, self.config, self.device, checked)


@dataclass(frozen=True)
class Stored:
    """A whole binary of a store.

    state "served":  a call finds it.
    state "apart":   it is kept under a name that no call looks for, because it was not checked.
    state "stale":   its kernel, sources, config or architecture are not those of this version.
    """

    entry: Entry
    root: Path
    state: str
    known: Known | None  # None if this version has no such kernel, config or architecture

    @property
    def arch(self) -> str:
        return str(self.entry.manifest.get("arch"))

    @property
    def verified(self) -> bool:
        return str(self.entry.manifest.get("verified")).startswith(VERIFIED)


@dataclass
class Inventory:
    """What lies in the user's store and in the package's own."""

    stored: list[Stored] = field(default_factory=list)
    damaged: list[Path] = field(default_factory=list)  # manifests without a whole entry


def take_inventory(archs: Sequence[str] | None, progress: Progress) -> Inventory:
    """Everything that is stored, of the given architectures or of all; what is in both stores counts once."""
    found, keys = Inventory(), set()
    manifests = [(store, path) for store in loader.stores() for path in sorted(store.root.glob("bin/*/*.json"))]
    for i, (store, path) in enumerate(manifests):
        entry = store.get(path.stem)
        if entry is None:
            found.damaged.append(path)
        elif entry.key not in keys and (archs is None or entry.manifest.get("arch") in archs):
            keys.add(entry.key)
            found.stored.append(_examine(entry, store.root))
        progress("read the stores", i + 1, len(manifests))
    return found


def _examine(entry: Entry, root: Path) -> Stored:
    known = _recognise(entry.manifest)
    if known is None:
        return Stored(entry, root, "stale", None)
    for state, checked in (("served", True), ("apart", False)):
        if entry.key == known.key(checked):
            return Stored(entry, root, state, known)
    return Stored(entry, root, "stale", known)


def _recognise(manifest: dict[str, Any]) -> Known | None:
    try:
        device = target.named(manifest["arch"])
        _, kernel = trials.find_kernel(manifest["kernel"], device.device)
        dims = manifest.get("static", {"K": 1, "V": 1})
        problem = Problem(kernel.op, manifest["dtype"], dims["K"], dims["V"], device.device)
        problem = build.shaping_problem(problem, device)
        return Known(kernel, problem, device, kernel.find_config(problem, device, manifest["config"]))
    except (KeyError, TypeError, ValueError):
        return None


# ---- what goes into a wheel


@dataclass
class Contents:
    """What a wheel brings along for one architecture."""

    arch: str
    rows: list[dict[str, Any]]  # tuned
    binaries: list[Stored] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)  # kernels without which other binaries serve no call


@dataclass
class Plan:
    """What a wheel brings along, and why the rest is left out."""

    contents: list[Contents]
    left_out: Counter[str]
    complaints: list[str]  # about binaries that were left out because they cannot be loaded or launched


def make_plan(archs: Sequence[str], progress: Progress) -> Plan:
    """Choose what a wheel for these architectures brings along.

    Raises ValueError for an unknown architecture, RuntimeError for one without a single binary to ship.
    """
    archs = list(dict.fromkeys(archs))
    for arch in archs:
        target.named(arch)
    inventory = take_inventory(archs, progress)
    plan = Plan([], Counter(damaged=len(inventory.damaged)), [])
    without = []
    for arch in archs:
        here = [x for x in inventory.stored if x.arch == arch]
        reasons: Counter[str] = Counter({"stale": 0, "not verified": 0, "unfit": 0})  # in this order in messages
        fit = [x for x in here if _fit(x, reasons, plan.complaints)]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{arch}.json")
            contents = Contents(arch, write_merged_table(arch, path))
            contents.binaries = best_binaries(fit, path)
        contents.lacking = _lacking(contents)
        reasons["of a slower config"] += len(fit) - len(contents.binaries)
        plan.contents.append(contents)
        plan.left_out += reasons
        if not contents.binaries:
            without.append(_how_to_build(arch, reasons))
    if without:
        raise RuntimeError("; ".join(without))
    return plan


def _fit(stored: Stored, reasons: Counter[str], complaints: list[str]) -> bool:
    """Whether a binary may be shipped; if not, why is counted."""
    if stored.state == "stale":
        reasons["stale"] += 1
    elif stored.state == "apart" or not stored.verified:
        reasons["not verified"] += 1
    elif found := static_check.check_usable(stored.entry.manifest, stored.entry.path.read_bytes()):
        reasons["unfit"] += 1
        complaints += [f"{describe(stored)}: {text}" for text in found]
    else:
        return True
    return False


def describe(stored: Stored) -> str:
    """A binary in a few words."""
    manifest = stored.entry.manifest
    dims = "".join(f" {name}={size}" for name, size in manifest.get("static", {}).items())
    return f"{manifest.get('arch')} {manifest.get('kernel')} {manifest.get('dtype')}{dims} {stored.entry.key[:12]}"


def _how_to_build(arch: str, reasons: Counter[str]) -> str:
    why = ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
    runs_here = arch not in target.CPU_ARCHS or arch in [t.arch for t in target.offered()]
    where = "" if runs_here else f" where it can be executed, on a CPU with {arch}"
    return f"no {arch} binary to ship ({why or 'none is stored'}); `linattn-tl build --arch {arch}` makes them{where}"


def write_merged_table(arch: str, path: Path) -> list[dict[str, Any]]:
    """Write the tuned rows of an architecture to path, the user's before those shipped; the rows."""
    rows: list[dict[str, Any]] = []
    for source in reversed(loader.tables(target.named(arch))):  # it has the most specific first
        rows = table.merge_rows(rows, table.read_rows(source))
    table.write_rows(path, arch, rows)
    return rows


def best_binaries(fit: Sequence[Stored], tuned: Path) -> list[Stored]:
    """Of the binaries of one architecture those that calls are served by, if they are all there is.

    For each kernel and dtype, and head dims where these shape a binary, that is the first config in the order that
    loader.find follows which has one. On a CPU the order alone depends on the head dims: it is asked for those of every
    tuned row, which is then the nearest, and for some others.
    """
    chosen: dict[str, Stored] = {}
    groups: dict[tuple[str, Problem], dict[str, Stored]] = {}
    for stored in fit:
        if stored.known is not None:
            groups.setdefault((stored.known.kernel.name, stored.known.problem), {})[stored.entry.key] = stored
    dims = {(K, V) for K in SIDES for V in SIDES} | {(row["K"], row["V"]) for row in table.read_rows(tuned)}
    for (_, problem), group in groups.items():
        known = next(iter(group.values())).known
        if known is None:  # as above; for the type checker
            continue
        for K, V in sorted({*dims, (problem.K, problem.V)}):
            probe = problem._replace(K=K, V=V)
            if build.shaping_problem(probe, known.device) != problem:
                continue
            for config in table.ordered_configs(known.kernel, probe, known.device, [tuned]):
                key = build.binary_key(known.kernel, probe, config, known.device)
                if key in group:
                    chosen[key] = group[key]
                    break
    return [chosen[key] for key in sorted(chosen)]


def _lacking(contents: Contents) -> list[str]:
    """Kernels that are missing beside others: a call is served by all that it needs, or by none."""
    there: dict[Problem, set[str]] = {}
    for stored in contents.binaries:
        if stored.known is not None:
            there.setdefault(stored.known.problem, set()).add(stored.known.kernel.name)
    found = []
    for problem, names in there.items():
        for kernel in trials.needed_kernels(problem, target.named(contents.arch)):
            if kernel.name not in names:
                dims = f" K={problem.K} V={problem.V}" if problem.device == "cuda" else ""
                found.append(f"{contents.arch} {kernel.name} {problem.dtype}{dims}")
    return found


# ---- the wheel


@dataclass(frozen=True)
class Made:
    """A wheel that was written."""

    path: Path
    tag: str
    plan: Plan


def make_wheel(archs: Sequence[str], folder: Path, progress: Progress) -> Made:
    """Write a wheel of the installed package with the binaries and the tuned tables of these architectures.

    The same package, binaries and tables give the same bytes.

    Raises ValueError for an unknown architecture, RuntimeError if there is nothing to ship for one, or if the package
    is not installed as a distribution of its own version.
    """
    info = distribution_info()
    plan = make_plan(archs, progress)
    files, glibc = package_files(), (0, 0)
    for contents in plan.contents:
        for stored in contents.binaries:
            binary = stored.entry.path
            place = f"{BINARIES}/{binary.relative_to(stored.root).with_suffix('').as_posix()}"
            files[f"{place}.so"] = binary.read_bytes()
            files[f"{place}.json"] = binary.with_suffix(".json").read_bytes()
            glibc = max(glibc, static_check.read_shared_object(files[f"{place}.so"]).glibc)
        if contents.rows:
            with tempfile.TemporaryDirectory() as temporary:
                path = Path(temporary, f"{contents.arch}.json")
                table.write_rows(path, contents.arch, contents.rows)
                files[f"{TABLES}/{path.name}"] = path.read_bytes()
    tag = wheel.platform_tag(glibc)
    path = wheel.write(folder, DISTRIBUTION, linattn_tl.__version__, tag, files, info, progress)
    return Made(path, tag, plan)


def package_files() -> dict[str, bytes]:
    """The files of the installed packages by their paths, less binaries and tables, which a wheel chooses anew."""
    files = {}
    for name in PACKAGES:
        root = Path(str(importlib.import_module(name).__file__)).parent
        for path in sorted(root.rglob("*")):
            inner = path.relative_to(root.parent)
            hidden = any(part.startswith(".") or part == "__pycache__" for part in inner.parts)
            if path.is_file() and not hidden and not inner.as_posix().startswith((f"{BINARIES}/", f"{TABLES}/")):
                files[inner.as_posix()] = path.read_bytes()
    return files


def distribution_info() -> dict[str, bytes]:
    """METADATA, entry points and licence of the installed package, by their paths under .dist-info."""
    version, others = linattn_tl.__version__, []
    for found in metadata.distributions(name=DISTRIBUTION):
        text = found.read_text("METADATA")
        if text is None:
            continue  # an .egg-info that a build left in the source tree: it has no licence, and may be old
        if found.version != version:
            others.append(found.version)
            continue
        licences = [f"licenses/{name}" for name in found.metadata.get_all("License-File") or ()]
        info = {name: found.read_text(name) for name in ("METADATA", "entry_points.txt", "top_level.txt", *licences)}
        if lacking := [name for name, content in info.items() if content is None]:
            raise RuntimeError(f"{DISTRIBUTION} {version} is installed without {', '.join(lacking)}; install it again")
        return {name: content.encode() for name, content in info.items() if content is not None}
    installed = f"{', '.join(others)} is installed" if others else "it is not installed"
    raise RuntimeError(
        f"a wheel is described by the metadata of {DISTRIBUTION} {version}, and {installed}; "
        f"`pip install` this version, or `pip install -e` its source tree"
    )
