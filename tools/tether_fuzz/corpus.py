"""The committed corpus: `tests/fuzz/corpus/<target>/<digest>`, one file an input, small and without doubles.

A file whose name begins with `fault-` is an input that once broke something: it is never thinned out.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from tether.limits import KIB

FILES_MAX: Final = 40  # of a target, without faults
FILE_BYTES_MAX: Final = 16 * KIB
TARGET_BYTES_MAX: Final = 32 * KIB
FOLDER: Final = Path(__file__).parents[2] / "tests" / "fuzz" / "corpus"


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def load(target: str, folder: Path = FOLDER) -> list[bytes]:
    """In a fixed order: the same seed makes the same run."""
    return [path.read_bytes() for path in files(target, folder)]


def files(target: str, folder: Path = FOLDER) -> list[Path]:
    return sorted(path for path in (folder / target).glob("*") if path.is_file())


def replace(target: str, inputs: list[bytes], folder: Path = FOLDER) -> None:
    """The corpus is some of these, of every length, as far as they fit, and its faults."""
    place = folder / target
    place.mkdir(parents=True, exist_ok=True)
    for path in place.glob("[0-9a-f]*"):
        if not path.name.startswith("fault-"):
            path.unlink()
    size = 0
    step = max(1, len(inputs) // FILES_MAX)
    for data in sorted(inputs, key=len, reverse=True)[step // 2 :: step][:FILES_MAX]:
        if len(data) <= FILE_BYTES_MAX and size + len(data) <= TARGET_BYTES_MAX:
            size += len(data)
            (place / name_of(data)).write_bytes(data)
