"""Cached binaries: content key, lock, fsync, atomic rename, checksum; whatever is not whole is a miss.

    <root>/bin/<key[:2]>/<key>.so     the binary
    <root>/bin/<key[:2]>/<key>.json   its manifest; renamed into place last, it makes the entry exist
    <root>/lock/<key>                 held while the entry is built

Standard library only.
"""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """A whole binary and what is known about it."""

    key: str
    path: Path
    manifest: dict[str, Any]  # what its maker said, and format, key, size and sha256


def make_key(**parts: Any) -> str:
    """sha256, in hex, of JSON values; neither the order of keywords nor that of dict keys counts."""
    return hashlib.sha256(_canonical(parts)).hexdigest()


class Store:
    """The binaries under a root. Only put and discard write, so get serves a read-only root too."""

    def __init__(self, root: Path):
        self.root = Path(root)

    def get(self, key: str) -> Entry | None:
        """The entry, or None if it is missing, damaged or of another format: what it reads never raises."""
        try:
            manifest = _open_sealed(self._manifest_path(key).read_bytes(), key)
            _check_binary(self._binary_path(key), manifest)
        except FileNotFoundError as missing:
            _log.debug("miss %s: no %s", key, missing.filename)
            return None
        except (OSError, ValueError, RecursionError) as why:
            _log.info("miss %s: %s", key, why)
            return None
        return Entry(key, self._binary_path(key), manifest)

    def put(self, key: str, make: Callable[[Path], dict[str, Any]]) -> Entry:
        """The entry, built if need be; of several processes that want the same key one builds it.

        make(path) writes the binary to path and returns what the manifest shall say (JSON values).
        What it raises propagates, and then nothing is stored.
        """
        with self._locked(key):
            # Another process may have built it while this one waited for the lock.
            return self.get(key) or self._build(key, make)

    def entries(self) -> Iterator[Entry]:
        """Every whole entry, in the order of the keys."""
        for path in sorted(self.root.glob("bin/*/*.json")):
            if entry := self.get(path.stem):
                yield entry

    def discard(self, key: str) -> None:
        """Removes the entry, if there is one."""
        with self._locked(key):
            self._manifest_path(key).unlink(missing_ok=True)  # first: without it there is no entry
            self._binary_path(key).unlink(missing_ok=True)

    def _folder(self, key: str) -> Path:
        return self.root / "bin" / key[:2]

    def _binary_path(self, key: str) -> Path:
        return self._folder(key) / f"{key}.so"

    def _manifest_path(self, key: str) -> Path:
        return self._folder(key) / f"{key}.json"

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        import fcntl  # POSIX only, and get must work without it

        path = self.root / "lock" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                # Closing would not do if a child forked meanwhile still has the file open.
                fcntl.flock(file, fcntl.LOCK_UN)

    def _build(self, key: str, make: Callable[[Path], dict[str, Any]]) -> Entry:
        folder = self._folder(key)
        folder.mkdir(parents=True, exist_ok=True)
        # We hold the lock, so what lies here unfinished was left by a process that was killed.
        _remove_temps(folder, key)
        binary_temp = folder / f"{key}.{os.getpid()}.so.tmp"
        manifest_temp = folder / f"{key}.{os.getpid()}.json.tmp"
        try:
            manifest = _describe(key, binary_temp, make(binary_temp))
            _fsync(binary_temp)
            os.replace(binary_temp, self._binary_path(key))
            manifest_temp.write_bytes(_seal(manifest))
            _fsync(manifest_temp)
            os.replace(manifest_temp, self._manifest_path(key))
            _fsync(folder)
        finally:
            _remove_temps(folder, key)
        return Entry(key, self._binary_path(key), manifest)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _describe(key: str, binary: Path, said: dict[str, Any]) -> dict[str, Any]:
    data = binary.read_bytes()
    if not data:
        raise ValueError(f"store: the binary made for {key} is empty")
    ours = {"format": FORMAT, "key": key, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if taken := sorted({*ours, "seal"} & said.keys()):
        raise ValueError(f"store: a manifest's {', '.join(taken)} are the store's own to write")
    return json.loads(_canonical({**said, **ours}))  # as get will read it: lists for tuples, str keys


def _seal(manifest: dict[str, Any]) -> bytes:
    """The manifest's text, with its own checksum in it."""
    seal = hashlib.sha256(_canonical(manifest)).hexdigest()
    return json.dumps({**manifest, "seal": seal}, sort_keys=True, indent=1, allow_nan=False).encode() + b"\n"


def _open_sealed(text: bytes, key: str) -> dict[str, Any]:
    """The manifest of key; ValueError unless text is, byte for byte, what _seal wrote for it."""
    manifest = json.loads(text)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"not a manifest of format {FORMAT}")
    manifest.pop("seal", None)
    if text != _seal(manifest):
        raise ValueError("the manifest is damaged")
    if manifest.get("key") != key:
        raise ValueError(f"the manifest is that of {manifest.get('key')}")
    return manifest


def _check_binary(path: Path, manifest: dict[str, Any]) -> None:
    size = path.stat().st_size
    if size != manifest["size"]:
        raise ValueError(f"the binary has {size} bytes; expected {manifest['size']}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != manifest["sha256"]:
        raise ValueError("the binary is damaged")


def _remove_temps(folder: Path, key: str) -> None:
    for path in folder.glob(f"{key}.*.tmp"):
        path.unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    """Brings a file's bytes, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
