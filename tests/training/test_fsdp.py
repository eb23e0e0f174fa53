"""FSDP: a sharded model has the same loss and gradients, and a run can use it as its strategy."""

import os

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import FSDPStrategy

from mrconv import MRConvBlock, SequenceClassifier
from mrconv.training.checkpoints import AtomicIO
from mrconv.training.trainer import make_trainer

from ..processes import run_processes
from .miniature import listops


def model():
    torch.manual_seed(0)
    return SequenceClassifier(
        n_classes=3, d_input=2, d_model=8, depth=2, l_max=40, kernel_size=2, seed=1, sync_stats=True
    )


def step(module, u, y):
    loss = torch.nn.functional.cross_entropy(module(u), y)
    loss.backward()
    return loss.item()


def worker(rank, path, results):
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    module = model()
    mesh = dist.init_device_mesh("cpu", (2,))
    for block in module.modules():
        if isinstance(block, MRConvBlock):
            fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    u, y = data()
    losses = torch.tensor([step(module, u[2 * rank : 2 * rank + 2], y[2 * rank : 2 * rank + 2])])
    dist.all_reduce(losses)
    grads = {name: p.grad.full_tensor() for name, p in module.named_parameters() if p.grad is not None}
    if rank == 0:
        torch.save((losses / 2, grads), results / "sharded.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def data():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(4, 33, 2, generator=generator), torch.tensor([0, 1, 2, 0])


def test_a_model_sharded_over_two_processes_has_the_gradients_of_one(tmp_path):
    run_processes(worker, tmp_path / "rendezvous", tmp_path)
    loss, grads = torch.load(tmp_path / "sharded.pt")
    single = model()
    assert abs(step(single, *data()) - loss.item()) < 1e-5
    for name, p in single.named_parameters():
        if p.grad is not None:
            assert torch.allclose(grads[name], p.grad, rtol=1e-3, atol=1e-5), name


def test_the_trainer_of_a_run_has_the_strategy(tmp_path, monkeypatch):
    for name, value in {"is_available": True, "device_count": 2, "is_bf16_supported": True}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value, **_: value)
    monkeypatch.setattr("lightning_fabric.accelerators.cuda.num_cuda_devices", lambda: 2)
    experiment = listops(strategy="fsdp", devices=2)
    experiment.accelerator = "gpu"
    trainer = make_trainer(experiment, tmp_path, [])
    assert isinstance(trainer.strategy, FSDPStrategy)
    assert isinstance(trainer.strategy.checkpoint_io, AtomicIO)
    assert trainer.strategy._state_dict_type == "full"  # one file, like every other checkpoint
    assert (trainer.num_devices, trainer.precision) == (2, "bf16-mixed")


@pytest.mark.slow
def test_the_strategy_raises_without_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="fsdp"):
        make_trainer(listops(strategy="fsdp"), tmp_path, [])
