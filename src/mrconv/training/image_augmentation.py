"""What is done to batches of pictures in training, on their device: crop, mirror, erase, mix.

All that is drawn comes from torch's own generators, whose states checkpoints keep. Nothing waits for the device.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from mrconv.tasks import Batch

from .experiment import Experiment

ERASED, ASPECTS = (0.02, 1 / 3), (0.3, 1 / 0.3)  # of a picture's area; height over width


def augment(batch: Batch, experiment: Experiment, classes: int) -> Batch:
    """Return a batch of pictures as the experiment changes them; mixed ones have shares (B, classes) for labels."""
    e, x, y = experiment, batch.x, batch.y
    if e.crop or e.flip:
        x = crop_and_flip(x, e.crop, e.flip)
    if e.erasing:
        x = erase(x, e.erasing)
    if e.mixup or e.cutmix:
        x, y = mix(x, y, classes, e.mixup, e.cutmix)
    return dataclasses.replace(batch, x=x, y=y)


def crop_and_flip(x: Tensor, margin: int, flip: bool) -> Tensor:
    """Return each picture of (B, C, H, W) moved by up to `margin` pixels, zeros coming in; mirrored or not."""
    B, _, H, W = x.shape
    top, left = torch.randint(2 * margin + 1, (2, B, 1), device=x.device)
    rows, columns = (torch.arange(n, device=x.device).expand(B, n) for n in (H, W))
    if flip:
        columns = torch.where(torch.rand(B, 1, device=x.device) < 0.5, W - 1 - columns, columns)
    one = torch.arange(B, device=x.device)[:, None, None]
    padded = F.pad(x, (margin,) * 4).permute(0, 2, 3, 1)
    return padded[one, (rows + top)[:, :, None], (columns + left)[:, None, :]].permute(0, 3, 1, 2)


def erase(x: Tensor, chance: float) -> Tensor:
    """Return pictures of which some have a rectangle of noise."""
    B, _, H, W = x.shape

    def drawn(low: float, high: float) -> Tensor:
        return torch.empty(B, 1, device=x.device).uniform_(low, high)

    area, aspect = drawn(*ERASED) * H * W, drawn(math.log(ASPECTS[0]), math.log(ASPECTS[1])).exp()
    inside = []
    for size, side in ((H, (area * aspect).sqrt()), (W, (area / aspect).sqrt())):
        side = side.round().clamp(1, size)
        start = (drawn(0, 1) * (size - side + 1)).floor()
        at = torch.arange(size, device=x.device)
        inside.append((at >= start) & (at < start + side))
    chosen = drawn(0, 1) < chance
    where = (inside[0] & chosen)[:, :, None] & inside[1][:, None, :]  # (B, H, W)
    return torch.where(where[:, None], torch.randn_like(x), x)


def mix(x: Tensor, y: Tensor, classes: int, mixup: float, cutmix: float) -> tuple[Tensor, Tensor]:
    """Return pictures mixed with those of the batch in reverse order, and the shares of the classes, (B, classes).

    Whole pictures are averaged (mixup) or a rectangle is exchanged (CutMix), if both are asked for by turns at random;
    the share kept is drawn from Beta(a, a) with a the strength given.
    """
    cut = bool(cutmix) and (not mixup or float(torch.rand(())) < 0.5)
    strength = cutmix if cut else mixup
    kept = float(torch.distributions.Beta(strength, strength).sample())
    other = x.flip(0)
    if cut:
        top, bottom, left, right = box(x.shape[2], x.shape[3], kept)
        kept = 1 - (bottom - top) * (right - left) / (x.shape[2] * x.shape[3])
        x = x.clone()
        x[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
    else:
        x = kept * x + (1 - kept) * other
    shares = F.one_hot(y, classes).to(torch.float32)
    return x, kept * shares + (1 - kept) * shares.flip(0)


def box(H: int, W: int, kept: float) -> tuple[int, int, int, int]:
    """Return top, bottom, left and right of a rectangle of 1 - kept of the area, somewhere, cut at the edges."""
    found = []
    for size, at in zip((H, W), torch.rand(2).tolist(), strict=True):
        centre, half = int(at * size), int(size * math.sqrt(1 - kept)) // 2
        found += [max(0, centre - half), min(size, centre + half)]
    return found[0], found[1], found[2], found[3]
