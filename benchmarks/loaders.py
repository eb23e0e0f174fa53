"""Measure batches per second of both loaders, on rows like ListOps': python benchmarks/loaders.py [--device cuda]."""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from mrconv.tasks import BatchLoader, Prepared, ResidentLoader, Split, data_loader


def listops_like(rows: int) -> Prepared:
    """Return rows of 500 to 2,000 tokens."""
    draw = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(draw.integers(500, 2001, rows))])
    split = Split("train", draw.integers(1, 18, offsets[-1], dtype=np.uint8), np.arange(rows) % 10, offsets)
    return Prepared("listops", "tokens", tuple("0123456789"), 2048, {"train": split})


def rate(loader: BatchLoader, device: str) -> float:
    """Return batches per second of one epoch, after a few to warm up."""
    for _, _ in zip(range(20), loader, strict=False):
        pass
    loader.set_epoch(1)
    start = time.perf_counter()
    count = sum(1 for _ in loader)
    if device == "cuda":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=96_000)
    given = parser.parse_args()
    data = listops_like(given.rows)
    for pad in ("batch", "max"):
        loaders = {
            "resident": ResidentLoader(data, "train", 50, device=given.device, pad=pad),
            "from disk": data_loader(data, "train", 50, pad=pad),
        }
        for name, loader in loaders.items():
            print(f"{name:10s} pad={pad:6s} {rate(loader, given.device):9,.0f} batches/s of 50 rows on {given.device}")


if __name__ == "__main__":
    main()
