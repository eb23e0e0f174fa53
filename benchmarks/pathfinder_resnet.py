"""Accuracy of a residual network, which sees images and not sequences, on Pathfinder.

    python benchmarks/pathfinder_resnet.py [--device cuda] [--epochs 20] [--plain] [--out FILE.json]

It is a lower bound of the accuracy that the images allow. Training images are rotated and flipped at random, which
does not change their class, unless --plain is given.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mrconv.bench import records
from mrconv.bench.script_options import parse
from mrconv.bench.timing import copy_bandwidth
from mrconv.tasks import Split, task


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a shortcut."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(out) for _ in range(2))
        self.shortcut = nn.Identity() if width == out and stride == 1 else nn.Conv2d(width, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, width, H, W) to (B, out, H / stride, W / stride)."""
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.shortcut(x))


def network(width: int) -> nn.Sequential:
    """Return a network of three stages of two blocks each; the width doubles where the image is halved."""
    blocks: list[nn.Module] = [nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage in range(3):
        for i in range(2):
            out = width * 2**stage
            blocks.append(Residual(channels, out, 2 if stage and not i else 1))
            channels = out
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 2))


def images(split: Split, size: int, device: str) -> tuple[Tensor, Tensor]:
    """Return the images (n, 1, size, size) of a split, as stored, and their classes."""
    x = torch.tensor(split.x, device=device).view(-1, 1, size, size)
    return x, torch.tensor(split.y, device=device)


def scaled(x: Tensor) -> Tensor:
    """Return images from -1 to 1, contiguous in channels."""
    return (x.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)


def symmetric(x: Tensor) -> Tensor:
    """Rotate and flip the images of a batch: an eighth in each way. Batches are drawn at random."""
    parts = [part.rot90(i % 4, (2, 3)) for i, part in enumerate(x.tensor_split(8))]
    return torch.cat([part.flip(3) if i >= 4 else part for i, part in enumerate(parts)])


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor, batch: int) -> float:
    """Return the accuracy on a split."""
    model.eval()
    pairs = zip(x.split(batch), y.split(batch), strict=True)
    right = [(logits(model, scaled(part)).argmax(1) == classes).sum() for part, classes in pairs]
    model.train()
    return torch.stack(right).sum().item() / len(y)


def logits(model: nn.Module, x: Tensor) -> Tensor:
    """Return logits in float32; on a GPU, convolutions run in bfloat16."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        return model(x).float()


def train(
    model: nn.Module, data: dict[str, tuple[Tensor, Tensor]], given: argparse.Namespace
) -> list[dict[str, float]]:
    """Train with SGD and one cycle of learning rate and momentum; return the scores of every epoch."""
    x, y = data["train"]
    steps = len(x) // given.batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, given.epochs * steps, pct_start=0.2)
    epochs = []
    for epoch in range(given.epochs):
        start, order = time.perf_counter(), torch.randperm(len(x), device=x.device)
        right = torch.zeros((), device=x.device)
        for part in order[: steps * given.batch].split(given.batch):
            inputs = scaled(x[part] if given.plain else symmetric(x[part]))
            scores = logits(model, inputs)
            optimizer.zero_grad()
            F.cross_entropy(scores, y[part]).backward()
            optimizer.step()
            schedule.step()
            right += (scores.detach().argmax(1) == y[part]).sum()
        row = {"epoch": epoch + 1, "train": right.item() / (steps * given.batch)}
        row |= {split: accuracy(model, *data[split], given.batch) for split in ("val", "test")}
        epochs.append({**row, "seconds": time.perf_counter() - start})
        print("  ".join(f"{key} {value:.4g}" for key, value in epochs[-1].items()), flush=True)
    return epochs


def main() -> int:
    """Train, print the scores of every epoch and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--count", type=int, default=200_000, help="images of all splits")
    parser.add_argument("--plain", action="store_true", help="train on the images as they are")
    parser.add_argument("--data-dir", type=Path, help="folder of the data; default: $MRCONV_DATA, else ./data")
    parser.add_argument("--out", type=Path, help="JSON file of the record")
    given = parse(parser)
    torch.manual_seed(0)
    prepared = task("pathfinder", given.data_dir, count=given.count).prepare()
    data = {name: images(split, prepared.image_size[0], given.device) for name, split in prepared.splits.items()}
    model = network(given.width).to(given.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    record: dict[str, Any] = records.record(
        "pathfinder_resnet", shlex.join(["python", *sys.argv]), given.device,
        "bfloat16" if given.device == "cuda" else "float32", 1, copy_bandwidth(given.device),
    )  # fmt: skip
    record["parameters"] = sum(p.numel() for p in model.parameters())
    record["rows"] = train(model, data, given)
    records.write(given.out, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
