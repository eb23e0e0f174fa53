"""Statistics synchronised over processes == one process on the concatenated batch."""

import datetime
import os

import pytest
import torch
import torch.distributed as dist

from mrconv import MRConv, SequenceClassifier

from .conftest import randomise
from .processes import run_processes

SPLIT = 3  # 3 sequences for the first process, 2 for the second


def make(kind, **options):
    torch.manual_seed(0)
    options |= {"kernel_size": 2, "bidirectional": True, "sync_stats": True, "seed": 1, "dtype": torch.float64}
    return randomise(MRConv(4, 50, kernel=kind, **options))


def make_model():
    torch.manual_seed(0)
    return SequenceClassifier(
        n_classes=3, d_input=4, d_model=6, depth=2, l_max=50, sync_stats=True, mask_padding=True, dtype=torch.float64
    )


LENGTHS = [37, 2, 20, 36, 9]
EMPTY = [37, 2, 20, 0, 0]  # the second process has no position


def data(lengths):
    draw = torch.Generator().manual_seed(3)
    u = torch.randn(5, 37, 4, dtype=torch.float64, generator=draw)
    return u, torch.tensor(lengths)


def cases():
    yield "fourier", make("fourier"), LENGTHS
    yield "dilated", make("dilated"), LENGTHS
    yield "model", make_model(), LENGTHS
    yield "fourier, empty", make("fourier"), EMPTY
    yield "model, empty", make_model(), EMPTY
    yield "first sequence of each process", make("fourier", stats_fraction=0.3), LENGTHS


def run(module, u, lengths):
    y = module(u, lengths=lengths)
    (y * torch.linspace(-1, 2, y[0].numel(), dtype=y.dtype).view_as(y[0])).square().sum().backward()
    return y.detach(), [p.grad for p in module.parameters()], list(module.buffers())


def run_whole(module, u, lengths):
    """Run the concatenated batch; those sequences are first that give each process its statistics."""
    order = torch.arange(5)
    if getattr(module, "stats_fraction", 1) < 1:
        module.stats_fraction, order = 0.4, torch.tensor([0, SPLIT, 1, 2, 4])
    y, grads, buffers = run(module, u[order], lengths[order])
    return y[order.argsort()], grads, buffers


def worker(rank, path, results):
    torch.set_num_threads(1)
    minute = datetime.timedelta(minutes=1)  # a process that waits for the other one fails
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=minute)
    local = slice(0, SPLIT) if rank == 0 else slice(SPLIT, None)
    out = {}
    for name, module, lengths in cases():
        u, lengths = data(lengths)
        y, grads, buffers = run(module, u[local], lengths[local])
        for g in grads:
            dist.all_reduce(g)
        out[name] = (y, grads, buffers)
    torch.save(out, results / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # at exit, torch's native threads sometimes abort in their destructors


def test_two_processes_equal_one_on_the_concatenated_batch(tmp_path):
    run_processes(worker, tmp_path / "rendezvous", tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name, module, lengths in cases():
        y, grads, buffers = run_whole(module, *data(lengths))
        assert torch.allclose(torch.cat([first[name][0], second[name][0]]), y, rtol=1e-9, atol=1e-11)
        largest = max(g.norm() for g in grads)
        for a, b, expected in zip(first[name][1], second[name][1], grads, strict=True):
            assert torch.equal(a, b)
            assert (a - expected).norm() < 1e-9 * largest
        for a, expected in zip(first[name][2], buffers, strict=True):
            assert torch.allclose(a.double(), expected.double(), rtol=1e-9)


def test_without_other_processes_the_option_has_no_effect():
    u, lengths = data(LENGTHS)
    synced, plain = make("fourier"), make("fourier")
    plain.sync_stats = False
    assert torch.equal(synced(u, lengths=lengths), plain(u, lengths=lengths))


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_gloo_is_available():
    assert dist.is_gloo_available()
