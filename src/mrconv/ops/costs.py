"""What the ops cost, as measured: the table that `dispatch` chooses by, and how it is read.

`costs.json` comes from `benchmarks/costs.py`. It has, for a kind of device and a precision, picoseconds per element of
the input against the kernel's reach, and for taps those of a pass over the input and of each tap.
"""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

from torch import Tensor

TABLE: dict[str, Any] = json.loads((resources.files(__package__) / "costs.json").read_text())


def _cost(device: str, precision: str, op: str, reach: int, taps: int) -> float:
    rows = TABLE[device if device in TABLE else "cpu"][precision].get(op)
    if rows is None:
        return math.inf
    if "tap" in rows:
        return rows["pass"] + rows["tap"] * taps
    lengths = [int(length) for length in rows]
    here = min(max(reach, lengths[0]), lengths[-1])
    after = next(i for i, length in enumerate(lengths) if length >= here)
    low, high = lengths[max(after - 1, 0)], lengths[after]
    part = 0.0 if low == high else math.log(here / low) / math.log(high / low)
    value = rows[str(low)] * (1 - part) + rows[str(high)] * part
    return value * (reach / lengths[-1] if op.startswith("toeplitz") and reach > lengths[-1] else 1)


def cost(u: Tensor, triton: bool, op: str, reach: int, taps: int = 0) -> float:
    """Return picoseconds per element of u that an op takes for kernels of that reach, or of so many taps."""
    return _cost("triton" if triton else u.device.type, "half" if u.element_size() == 2 else "float32", op, reach, taps)
