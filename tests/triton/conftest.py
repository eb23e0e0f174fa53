"""Triton's kernels: on a GPU for real, else through its interpreter, which `make test` switches on for this folder."""

import os

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return
    skip = pytest.mark.skip(reason="needs a GPU, or TRITON_INTERPRET=1 (make test sets it)")
    for item in items:
        if "tests/triton" in item.nodeid:
            item.add_marker(skip)
