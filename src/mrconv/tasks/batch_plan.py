"""The assignment of examples to batches and of batches to processes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BUCKET_BATCHES = 50  # examples are sorted by length within groups of this many batches


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The examples of each batch, for one of `world` processes; a function of the seed and the epoch alone.

    In training, every process takes its share of each global batch, and examples that do not fill a batch are left out.
    In evaluation, every example occurs exactly once over all processes.

    Args:
        examples: number of examples.
        batch_size: examples per batch and process.
        train: shuffle, and drop examples that do not fill a batch.
        seed: seed of the shuffling.
        rank, world: index of this process and number of processes.
        lengths: lengths of all examples; if given, the examples of a batch have similar lengths, and batches still
            differ between epochs of training.
        limit: number of batches in an epoch, spread evenly over it, so that they represent a split ordered by length or
            class; 0 for all.
    """

    examples: int
    batch_size: int
    train: bool
    seed: int = 0
    rank: int = 0
    world: int = 1
    lengths: np.ndarray | None = None
    limit: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1 or not 0 <= self.rank < self.world:
            raise ValueError(
                f"need batch_size >= 1 and 0 <= rank < world; got {self.batch_size}, {self.rank} and {self.world}"
            )
        if self.train and self.examples < self.batch_size * self.world:
            raise ValueError(
                f"{self.examples} training examples do not fill one batch of {self.batch_size} in {self.world} "
                "process(es): lower batch_size"
            )

    def __len__(self) -> int:
        """Return the number of batches of this process in an epoch."""
        if self.train:
            batches = self.examples // (self.batch_size * self.world)
        else:
            batches = -(-len(range(self.rank, self.examples, self.world)) // self.batch_size)
        return min(batches, self.limit or batches)

    def local(self, batch: np.ndarray) -> np.ndarray:
        """Return this process's share of a batch that `batches` returned."""
        return batch[self.rank :: self.world] if self.train else batch

    def batches(self, epoch: int) -> list[np.ndarray]:
        """Return the indices of the examples of every batch: global batches in training, else those of this process.

        With a limit, each batch is the middle one of its part of the epoch.
        """
        every, n = self._all_batches(epoch), len(self)
        return [every[(2 * i + 1) * len(every) // (2 * n)] for i in range(n)]

    def _all_batches(self, epoch: int) -> list[np.ndarray]:
        if not self.train:
            order = np.arange(self.rank, self.examples, self.world)
            if self.lengths is not None:
                order = order[np.argsort(self.lengths[order], kind="stable")]
            return [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        generator = np.random.default_rng([self.seed, epoch])
        order = generator.permutation(self.examples)
        size = self.batch_size * self.world
        if self.lengths is not None:
            buckets = [order[i : i + BUCKET_BATCHES * size] for i in range(0, self.examples, BUCKET_BATCHES * size)]
            order = np.concatenate([part[np.argsort(self.lengths[part], kind="stable")] for part in buckets])
        batches = order[: self.examples // size * size].reshape(-1, size)
        if self.lengths is not None:  # part of a batch has the lengths of the whole, for `stats_fraction`
            batches = generator.permuted(generator.permutation(batches), axis=1)
        return list(batches)
