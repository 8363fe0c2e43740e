"""python page_end.py OBJECT DTYPE: rows of 0 to 39 elements that end where a page without access begins."""

import ctypes
import mmap
import sys


def guarded_end() -> int:
    """The address behind a page that may be used; what follows may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    area = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    guard = ctypes.addressof(ctypes.c_char.from_buffer(area)) + mmap.PAGESIZE
    if libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    _kept.append(area)
    return guard


_kept: list[mmap.mmap] = []


def main(path: str, dtype: str) -> None:
    library = ctypes.CDLL(path)
    element = 4 if dtype == "float32" else 2
    wide_end, narrow_end = guarded_end(), guarded_end()
    calls = 0
    for width in range(40):
        wide, narrow = ctypes.c_void_p(wide_end - 4 * width), ctypes.c_void_p(narrow_end - element * width)
        library[f"call_load_{dtype}"](wide, narrow, 0, 0, width)
        library[f"call_store_{dtype}"](narrow, wide, 0, 0, width)
        calls += 2
    print(f"{calls} calls")


main(*sys.argv[1:])
