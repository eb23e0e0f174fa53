"""Reading of NumPy's .npy and .npz files: only the arrays that are asked for, checked before they are allocated."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from .archives import read_zip_member
from .reading import Expansion, reading

NOT_NPZ = "is not a file of arrays saved by numpy.savez"
HEADERS: dict[tuple[int, int], Any] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def array_names(path: Path) -> list[str]:
    """Return the names of the arrays in an .npz file."""
    with reading(path, NOT_NPZ, ""), zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def read_arrays(path: Path, names: Collection[str]) -> dict[str, np.ndarray]:
    """Return the arrays of these names in an .npz file; those that it does not have are left out."""
    arrays = {}
    expansion = Expansion(path)
    with reading(path, NOT_NPZ, ""), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name in names:
                arrays[name] = parse_npy(
                    read_zip_member(archive, info, f"{path}, {name}", expansion), f"{path}, {name}"
                )
    return arrays


def parse_npy(content: bytes, where: str) -> np.ndarray:
    """Return the array in the content of an .npy file; it is read-only."""
    with reading(where, "is not an array of numbers or strings saved by numpy", ""):
        file = io.BytesIO(content)
        shape, fortran, dtype = HEADERS[np.lib.format.read_magic(file)](file)
        if dtype.hasobject or dtype.names or dtype.subdtype:
            raise ValueError(f"its dtype is {dtype}")
        data = memoryview(content)[file.tell() :]  # codespell:ignore tell
        expected = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or expected != len(data):
            raise ValueError(f"{len(data):,} bytes; its shape {shape} needs {expected:,}")
        if dtype.kind == "U":
            codes = np.frombuffer(data, np.dtype(np.uint32).newbyteorder(dtype.byteorder))
            if ((codes > 0x10FFFF) | ((codes >= 0xD800) & (codes < 0xE000))).any():
                raise ValueError("its strings have code points that are no characters")
        return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
