"""Outputs of a model for the examples of a split; those of windows are averaged over the sequence they are cut from."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from mrconv.tasks import BatchLoader

from .module import logits


def model_outputs(
    model: nn.Module, loader: BatchLoader, device: torch.device, rate: float | None, on_batch: Callable[[], None]
) -> Iterator[tuple[np.ndarray, Tensor, Tensor]]:
    """Yield the indices of examples, their outputs and their labels, batch by batch.

    The windows of a sequence count as one example, as in a prediction, except for a target of positions. Its index is
    that of its first window.
    """
    windows = []
    averaged = loader.split.origins is not None and loader.data.target != "positions"
    for indices, batch in zip(loader.plan.batches(0), loader, strict=True):
        batch = batch.to(device)
        each = indices, logits(model, batch, rate), batch.y
        if averaged:
            windows.append(each)
        else:
            yield each
        on_batch()
    if windows:
        assert loader.split.origins is not None
        every, outputs, y = zip(*windows, strict=True)
        indices, all_y = np.concatenate(every), torch.cat(y)
        _, first, members = np.unique(loader.split.origins[indices], return_index=True, return_inverse=True)
        means = mean_outputs(torch.cat(outputs), torch.from_numpy(members).to(device), loader.data.target)
        yield indices[first], means, all_y[torch.from_numpy(first).to(device)]


def mean_outputs(outputs: Tensor, members: Tensor, target: str) -> Tensor:
    """Return the outputs (groups, outputs) whose probabilities are the means over the members of each group.

    Args:
        outputs: logits or, for target "values", values (n, outputs).
        members: the group of each, (n,).
        target: "class", "labels" or "values".
    """
    outputs = outputs.float()
    z = {"class": lambda: outputs.softmax(-1), "labels": outputs.sigmoid, "values": lambda: outputs}[target]()
    counts = torch.bincount(members)
    means = z.new_zeros(len(counts), z.shape[1]).index_add_(0, members, z) / counts[:, None]
    if target == "values":
        return means
    return means.logit(1e-7) if target == "labels" else means.clamp_min(torch.finfo(means.dtype).tiny).log()
