"""Writing a wheel: names, tags, RECORD, and the same bytes for the same content. Standard library only."""

import base64
import csv
import hashlib
import io
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

OLDEST_GLIBC = (2, 17)  # no older tag is worth its name: Python 3.10 and torch want newer ones
_DATE = (1980, 1, 1, 0, 0, 0)  # the oldest that a zip file can say


def platform_tag(glibc: tuple[int, int]) -> str:
    """The tag of x86-64 binaries that need this glibc or a newer one."""
    major, minor = max(glibc, OLDEST_GLIBC)
    return f"manylinux_{major}_{minor}_x86_64"


def write(
    folder: Path,
    name: str,
    version: str,
    platform: str,
    files: Mapping[str, bytes],
    info: Mapping[str, bytes],
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None,
) -> Path:
    """Write a wheel for every Python 3 into folder, by an atomic rename; its path.

    Args:
        folder: created if need be.
        name: of the distribution, as its METADATA has it.
        version: likewise.
        platform: what platform_tag gives.
        files: content by path under site-packages, with /.
        info: content by path under the .dist-info folder, less WHEEL and RECORD, which are written here.
        progress: called with ("compress", files done, of how many).
    """
    stem = f"{re.sub(r'[-_.]+', '_', name).lower()}-{version}"
    tag = f"py3-none-{platform}"
    wheel = f"Wheel-Version: 1.0\nGenerator: {name} {version}\nRoot-Is-Purelib: false\nTag: {tag}\n"
    described = {f"{stem}.dist-info/{path}": data for path, data in {**info, "WHEEL": wheel.encode()}.items()}
    record = f"{stem}.dist-info/RECORD"
    # the description comes last, so that it can be read, and replaced, without touching the rest
    content = {**dict(sorted(files.items())), **dict(sorted(described.items()))}
    content[record] = _record(content, record)
    path = folder / f"{stem}-{tag}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_bytes(_zip(content, progress))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _record(content: Mapping[str, bytes], own_path: str) -> bytes:
    """A line a file: path, sha256 and size; RECORD itself has neither."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    for path, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.writerow((path, f"sha256={digest}", len(data)))
    lines.writerow((own_path, "", ""))
    return text.getvalue().encode()


def _zip(content: Mapping[str, bytes], progress: Callable[[str, int, int], None]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for i, (path, data) in enumerate(content.items()):
            entry = zipfile.ZipInfo(path, _DATE)
            entry.create_system = 3  # Unix, wherever this runs: it gives the next line its meaning
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED, 9)
            progress("compress", i + 1, len(content))
    return buffer.getvalue()
