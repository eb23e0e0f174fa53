"""Every Triton kernel compiles for all supported GPUs, without having one, and fits into their shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # 100 s for each kind of GPU
KIB = 2**10


@pytest.mark.parametrize(
    ("capability", "limit"),
    [
        pytest.param(75, 64 * KIB, id="Turing"),
        pytest.param(80, 163 * KIB, id="Ampere"),  # smaller ones and Ada have its instructions, and 99 KiB as below
        pytest.param(90, 227 * KIB, id="Hopper"),
        pytest.param(100, 227 * KIB, id="Blackwell"),
        pytest.param(120, 99 * KIB, id="Blackwell, smaller"),
    ],
)
def test_kernels_compile(capability, limit, tmp_path):
    root = Path(__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.compile_triton", str(capability)]
    process = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    compiled = json.loads(process.stdout)
    assert compiled["missed"] == []
    assert {name: shared for name, shared in compiled["shared"].items() if shared > limit} == {}
