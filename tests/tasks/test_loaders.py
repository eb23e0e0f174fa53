"""Loaders: contents of batches, reproducibility, resuming, and shares of processes."""

import numpy as np
import pytest
import torch

from mrconv.tasks import Prepared, ResidentLoader, Split, data_loader
from mrconv.tasks.batch_plan import BUCKET_BATCHES, BatchPlan
from mrconv.tasks.worker_loader import WorkerLoader


def ragged(n, seed=0, longest=30):
    draw = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(draw.integers(1, longest + 1, n))])
    return draw.integers(1, 9, offsets[-1]).astype(np.uint8), offsets


def sequences(n=53, pair=False):
    x, offsets = ragged(n)
    second = dict(zip(("x2", "offsets2"), ragged(n, 1), strict=True)) if pair else {}
    split = Split("train", x, np.arange(n, dtype=np.int16), offsets, **second)
    vocabulary = ("<pad>", *"abcdefgh")
    return Prepared(
        "text", "tokens", tuple(map(str, range(n))), 32, {"train": split, "test": split}, vocabulary, pair=pair
    )


def images(n=23):
    x = np.random.default_rng(0).integers(0, 256, (n, 16, 3)).astype(np.uint8)
    split = Split("train", x, np.arange(n, dtype=np.uint8))
    scale, shift = np.array([[1, 2, 3]]) / 255, np.array([[0, -1, 1]])
    return Prepared("image", "values", tuple(map(str, range(n))), 16, {"train": split}, (), 3, scale, shift)


def resident(*args, **options):
    return ResidentLoader(*args, device="cpu", **options)


LOADERS = [data_loader, resident]


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("pair", [False, True])
def test_sequences_are_padded_to_the_longest_of_a_batch(make, pair):
    data = sequences(pair=pair)
    split = data.splits["train"]
    for batch in make(data, "train", 5):
        sides = [(batch.x, batch.lengths, split.example)] + ([(batch.x2, batch.lengths2, split.second)] if pair else [])
        for x, lengths, sequence in sides:
            assert x.dtype == torch.int64
            assert x.shape == (5, lengths.max())
            for i, label in enumerate(batch.y.tolist()):
                expected = torch.from_numpy(sequence(label).astype(np.int64))
                assert torch.equal(x[i, : lengths[i]], expected)
                assert not x[i, lengths[i] :].any()


@pytest.mark.parametrize("make", LOADERS)
def test_sequences_are_padded_to_a_fixed_length_or_a_multiple(make):
    assert {batch.x.shape for batch in make(sequences(), "train", 5, pad="max")} == {(5, 32)}
    widths = {batch.x.shape[1] for batch in make(sequences(), "train", 5, pad=12)}
    assert widths <= {12, 24, 32}
    assert len(widths) > 1


@pytest.mark.parametrize("make", LOADERS)
def test_values_are_scaled(make):
    data = images()
    for batch in make(data, "train", 4):
        stored = torch.from_numpy(data.splits["train"].x[batch.y.numpy()]).double()
        assert batch.lengths is None
        assert batch.x.dtype == torch.float32
        assert torch.allclose(batch.x.double(), stored * torch.tensor(data.scale) + torch.tensor(data.shift), atol=1e-6)


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_sees_every_example_exactly_once_over_all_processes(make, world):
    shards = [make(sequences(), "test", 5, rank=rank, world=world) for rank in range(world)]
    assert [len(list(shard)) for shard in shards] == [len(shard) for shard in shards]
    seen = [int(i) for shard in shards for batch in shard for i in batch.y]
    assert sorted(seen) == list(range(53))


@pytest.mark.parametrize("bucket", [False, True])
def test_processes_share_the_training_batches(bucket):
    data = sequences()
    single = list(resident(data, "train", 6, seed=3, bucket=bucket))
    shards = [list(resident(data, "train", 3, seed=3, rank=rank, world=2, bucket=bucket)) for rank in range(2)]
    for batch, *parts in zip(single, *shards, strict=True):
        assert sorted(batch.y.tolist()) == sorted(i for part in parts for i in part.y.tolist())


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("bucket", [False, True])
def test_epochs_differ_and_repeat_with_the_same_seed(make, bucket):
    loader, again, other = (make(sequences(), "train", 5, seed=seed, bucket=bucket) for seed in (1, 1, 2))
    first, second = [[b.y.tolist() for b in loader] for _ in range(2)]
    assert first != second
    assert [b.y.tolist() for b in again] == first
    assert [b.y.tolist() for b in other] != first
    again.set_epoch(1)
    assert [b.y.tolist() for b in again] == second
    assert len({i for batch in first for i in batch}) == 50


@pytest.mark.parametrize("make", LOADERS)
def test_both_loaders_give_the_same_batches_and_resume_within_an_epoch(make):
    uninterrupted = make(sequences(), "train", 5, seed=7)
    expected = [b.y.tolist() for _ in range(2) for b in uninterrupted]
    stopped = make(sequences(), "train", 5, seed=7)
    batches = iter(stopped)
    seen = [next(batches).y.tolist() for _ in range(4)]
    fresh = (data_loader if make is resident else resident)(sequences(), "train", 5, seed=7)
    fresh.load_state_dict(stopped.state_dict())
    seen += [b.y.tolist() for _ in range(2) for b in fresh]
    assert seen == expected


def test_resuming_with_other_data_raises():
    loader = resident(sequences(), "train", 5)
    with pytest.raises(ValueError, match="batches was 13 and is 10"):
        loader.load_state_dict(resident(sequences(), "train", 4).state_dict())


def test_buckets_pad_less_and_keep_all_examples():
    n = 4 * BUCKET_BATCHES * 8
    x, offsets = ragged(n, longest=200)
    data = Prepared("t", "tokens", (), 200, {"train": Split("train", x, np.arange(n), offsets)})
    sizes = {}
    for bucket in (False, True):
        batches = list(resident(data, "train", 8, bucket=bucket))
        assert sorted(i for b in batches for i in b.y.tolist()) == list(range(n))
        sizes[bucket] = sum(b.x.numel() for b in batches)
    assert sizes[True] < 0.65 * sizes[False]


def test_a_part_of_a_bucketed_batch_has_the_lengths_of_the_whole():
    batches = np.stack(BatchPlan(1000, 50, True, lengths=np.arange(1000)).batches(0))
    assert (np.ptp(batches, axis=1) == 49).all()  # similar lengths
    assert abs(batches[:, :12].mean() - batches.mean()) < 2  # 19 if sorted


@pytest.mark.parametrize("train", [True, False])
def test_a_limited_plan_has_batches_spread_over_the_epoch(train):
    every, three, more = (BatchPlan(50, 4, train, lengths=np.arange(50), limit=limit) for limit in (0, 3, 20))
    batches = np.array([batch[:2] for batch in every.batches(1)])
    assert (len(every), len(three), len(more)) == (len(batches), 3, len(batches))
    assert np.array_equal([batch[:2] for batch in three.batches(1)], batches[[2, 6, 10]])
    assert np.array_equal([batch[:2] for batch in more.batches(1)], batches)


def test_workers_give_the_same_batches():
    data = sequences()
    single, workers = (WorkerLoader(data, "train", 5, workers=n) for n in (0, 2))
    for a, b in zip(single, workers, strict=True):
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "dev"}, "text has no split 'dev'; its splits are train, test"),
        ({"batch_size": 60}, "53 training examples do not fill one batch of 60"),
        ({"pad": "longest"}, "pad must be 'batch', 'max' or a number of positions; got 'longest'"),
        ({"rank": 2, "world": 2}, "0 <= rank < world"),
    ],
)
def test_invalid_arguments_raise(change, message):
    options = {"split": "train", "batch_size": 5, **change}
    with pytest.raises(ValueError, match=message):
        data_loader(sequences(), **options)


def test_evaluation_may_leave_a_process_without_examples():
    assert [len(BatchPlan(2, 4, False, rank=rank, world=3)) for rank in range(3)] == [1, 1, 0]


def test_files_cannot_be_resident():
    split = Split("train", np.array([b"a.png", b"b.png"]), np.arange(2))
    with pytest.raises(ValueError, match="list of files"):
        resident(Prepared("imagenet", "image", ("a", "b"), 4, {"train": split}), "train", 1)


def test_decimation_takes_every_second_sample():
    scale = np.arange(1, 17)[:, None] / 10
    data = Prepared("s", "values", ("0",), 16, {"train": images().splits["train"]}, (), 3, scale, 0.5)
    half = data.decimated(0.5)
    assert half.length == 8
    assert np.array_equal(half.splits["train"].x, data.splits["train"].x[:, ::2])
    assert np.array_equal(half.scale, scale[::2])
    for rate in (0.7, 0, -0.5, 2):
        with pytest.raises(ValueError, match="rate must be 1, 1/2, 1/3"):
            data.decimated(rate)
    with pytest.raises(ValueError, match="has no sampling rate"):
        sequences().decimated(0.5)
