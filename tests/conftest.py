"""Where test runs keep their binaries, what they are seeded with, and what they say about a missing GPU."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "linattn_tl"
NO_GPU = "needs a CUDA device, and torch sees none"

if "LINATTN_TL_CACHE_DIR" not in os.environ:
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE.parent / ".gitignore").write_text("*\n")
    os.environ["LINATTN_TL_CACHE_DIR"] = str(CACHE)
# a developer's own settings would change which backend a test gets
os.environ.pop("LINATTN_TL_BACKEND", None)
os.environ.pop("LINATTN_TL_STRICT", None)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def threads_restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture
def nan_filled() -> Iterator[None]:
    """torch.empty and its kin are filled with NaN, so that an element nobody wrote shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def fresh_choices() -> Iterator[None]:
    """The registry chooses anew in this test and after it: for tests that change the settings."""
    from linattn_tl import registry

    registry.forget_choices()
    yield
    registry.forget_choices()


@pytest.fixture(scope="session")
def binaries() -> None:
    """A binary of every op and dtype is in the cache: built by the first run, found by the next ones."""
    from tests.conformance import build_binaries

    build_binaries()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [r for r in terminalreporter.stats.get("skipped", ()) if NO_GPU in str(r.longrepr)]
    if skipped:
        terminalreporter.section(f"{len(skipped)} not run for want of a GPU")
        for report in skipped:
            terminalreporter.line(report.nodeid)
