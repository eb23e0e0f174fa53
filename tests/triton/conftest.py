"""Fixtures for Triton kernels, which run on a GPU or in Triton's interpreter, as in `make test`."""

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


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Fill allocated tensors with NaN, so that an element that no program writes is noticed."""
    for owner, name in ((torch, "empty_like"), (torch, "empty"), (torch.Tensor, "new_empty")):
        allocate = getattr(owner, name)

        def poisoned(*args, allocate=allocate, **kwargs):
            x = allocate(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() and not x.is_meta else x

        monkeypatch.setattr(owner, name, poisoned)
