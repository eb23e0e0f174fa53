"""Measure the throughput of both loaders on data like ListOps: python benchmarks/loaders.py [--device cuda]."""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from mrconv.tasks import BatchLoader, Prepared, ResidentLoader, Split, data_loader


def listops_like(examples: int) -> Prepared:
    """Return random sequences of 500 to 2,000 tokens."""
    generator = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(generator.integers(500, 2001, examples))])
    x = generator.integers(1, 18, offsets[-1], dtype=np.uint8)
    split = Split("train", x, np.arange(examples) % 10, offsets)
    return Prepared("listops", "tokens", tuple("0123456789"), 2048, {"train": split})


def batches_per_second(loader: BatchLoader, device: str) -> float:
    """Return the throughput of one epoch after a warm-up."""
    for _, _ in zip(range(20), loader, strict=False):
        pass
    loader.set_epoch(1)
    start = time.perf_counter()
    count = sum(1 for _ in loader)
    if device == "cuda":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def main() -> None:
    """Measure both loaders and print their throughput."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--examples", type=int, default=96_000)
    args = parser.parse_args()
    data = listops_like(args.examples)
    for pad in ("batch", "max"):
        loaders = {
            "resident": ResidentLoader(data, "train", 50, device=args.device, pad=pad),
            "from disk": data_loader(data, "train", 50, pad=pad),
        }
        for name, loader in loaders.items():
            rate = batches_per_second(loader, args.device)
            print(f"{name:10s} pad={pad:6s} {rate:9,.0f} batches of 50 a second on {args.device}")


if __name__ == "__main__":
    main()
