"""Augmentation of training batches of images on their device: crop, flip, rotation, erasing, mixup and CutMix.

All random numbers come from torch's generators, whose states are saved in checkpoints. Nothing synchronises with the
device.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mrconv.tasks import Batch, Prepared

from .experiment import Experiment

ERASED_AREA = (0.02, 1 / 3)  # fraction of an image
ERASED_ASPECT = (0.3, 1 / 0.3)  # height over width


def augment(batch: Batch, experiment: Experiment, data: Prepared) -> Batch:
    """Return an augmented batch of images, or of sequences of their pixels.

    The labels of mixed images are probabilities (B, classes).
    """
    e, x, y = experiment, batch.x, batch.y
    flattened = data.encoder != "image"
    if flattened:
        x = x.unflatten(1, data.image_size).permute(0, 3, 1, 2)
    if e.crop or e.flip:
        x = crop_and_flip(x, e.crop, e.flip, data.shift)
    if e.rotate:
        x = rotate(x)
    if e.erasing:
        x = erase(x, e.erasing)
    if e.mixup or e.cutmix:
        x, y = mix(x, y, len(data.classes), e.mixup, e.cutmix)
    if flattened:
        x = x.permute(0, 2, 3, 1).flatten(1, 2)
    return dataclasses.replace(batch, x=x, y=y)


def crop_and_flip(x: Tensor, margin: int, flip: bool, black: np.ndarray | float = 0.0) -> Tensor:
    """Shift each image of (B, C, H, W) by up to `margin` pixels, and flip half of them.

    Beyond the border, pixels are `black`, one value or one of each channel.
    """
    B, C, H, W = x.shape
    top, left = torch.randint(2 * margin + 1, (2, B, 1), device=x.device)
    rows, columns = (torch.arange(n, device=x.device).expand(B, n) for n in (H, W))
    if flip:
        columns = torch.where(torch.rand(B, 1, device=x.device) < 0.5, W - 1 - columns, columns)
    image = torch.arange(B, device=x.device)[:, None, None]
    padded = x.new_empty(B, C, H + 2 * margin, W + 2 * margin)
    for channel, value in enumerate(np.broadcast_to(black, C).tolist()):  # a copy from the host would synchronise
        padded[:, channel] = value
    padded[:, :, margin : margin + H, margin : margin + W] = x
    padded = padded.permute(0, 2, 3, 1)
    return padded[image, (rows + top)[:, :, None], (columns + left)[:, None, :]].permute(0, 3, 1, 2)


def rotate(x: Tensor) -> Tensor:
    """Rotate each image of (B, C, H, H) by a random multiple of a right angle."""
    turns = torch.randint(4, (len(x),), device=x.device)
    every = torch.stack([x.rot90(k, (2, 3)) for k in range(4)])
    return every[turns, torch.arange(len(x), device=x.device)]


def erase(x: Tensor, probability: float) -> Tensor:
    """Replace a random rectangle of each image by noise, with this probability."""
    B, _, H, W = x.shape

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(B, 1, device=x.device).uniform_(low, high)

    area = uniform(*ERASED_AREA) * H * W
    aspect = uniform(math.log(ERASED_ASPECT[0]), math.log(ERASED_ASPECT[1])).exp()
    inside = []
    for size, side in ((H, (area * aspect).sqrt()), (W, (area / aspect).sqrt())):
        side = side.round().clamp(1, size)
        start = (uniform(0, 1) * (size - side + 1)).floor()
        position = torch.arange(size, device=x.device)
        inside.append((position >= start) & (position < start + side))
    chosen = uniform(0, 1) < probability
    mask = (inside[0] & chosen)[:, :, None] & inside[1][:, None, :]  # (B, H, W)
    return torch.where(mask[:, None], torch.randn_like(x), x)


def mix(x: Tensor, y: Tensor, classes: int, mixup: float, cutmix: float) -> tuple[Tensor, Tensor]:
    """Mix images with those of the batch in reverse order; return them with the class probabilities (B, classes).

    Mixup averages whole images, CutMix exchanges a rectangle; with both, each batch uses one of them at random. The
    fraction of the first image is drawn from Beta(a, a), where a is the strength `mixup` or `cutmix`.
    """
    cut = bool(cutmix) and (not mixup or float(torch.rand(())) < 0.5)
    strength = cutmix if cut else mixup
    fraction = float(torch.distributions.Beta(strength, strength).sample())
    other = x.flip(0)
    if cut:
        top, bottom, left, right = random_box(x.shape[2], x.shape[3], fraction)
        fraction = 1 - (bottom - top) * (right - left) / (x.shape[2] * x.shape[3])
        x = x.clone()
        x[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
    else:
        x = fraction * x + (1 - fraction) * other
    one_hot = F.one_hot(y, classes).to(torch.float32)
    return x, fraction * one_hot + (1 - fraction) * one_hot.flip(0)


def random_box(H: int, W: int, outside: float) -> tuple[int, int, int, int]:
    """Return top, bottom, left and right of a random rectangle that leaves a fraction `outside`, cut at the edges."""
    edges = []
    for size, at in zip((H, W), torch.rand(2).tolist(), strict=True):
        centre, half = int(at * size), int(size * math.sqrt(1 - outside)) // 2
        edges += [max(0, centre - half), min(size, centre + half)]
    return edges[0], edges[1], edges[2], edges[3]
