"""Averaged weights: floating-point tensors only, without reading from the device, and resumed."""

import pytest
import torch
from pytorch_lightning.callbacks import Callback
from torch.utils._python_dispatch import TorchDispatchMode

from mrconv.training import loop, trainer

from .miniature import listops

pytestmark = pytest.mark.usefixtures("without_figures")
DECAY = 0.9


class Recorder(Callback):
    """Records the state of the model after every step, and of the averaged model after the last one."""

    def __init__(self):
        self.steps, self.averaged = [], {}

    def on_train_batch_end(self, trainer, module, *_):
        self.steps.append({name: x.clone() for name, x in module.model.state_dict().items()})

    def on_train_epoch_end(self, trainer, module):
        self.averaged = {name: x.clone() for name, x in averaging(trainer)._average_model.module.state_dict().items()}


class NoReading(TorchDispatchMode):
    """Rejects operations that read a value from the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func != torch.ops.aten._local_scalar_dense.default, "the host waits for the device"
        return func(*args, **(kwargs or {}))


def averaging(trainer):
    (callback,) = [each for each in trainer.callbacks if hasattr(each, "_average_model")]
    return callback


@pytest.fixture
def record(tmp_path, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(
        loop, "make_trainer", lambda e, f, callbacks: trainer.make_trainer(e, f, [*callbacks, recorder])
    )
    options = {"kernel": "fourier+sparse", "kernel_size": 8, "ema": DECAY, "epochs": 1}
    loop.train(listops(precise_stats=0, data_dir=str(tmp_path / "data"), **options), tmp_path / "run", quiet=True)
    return recorder


def test_floating_point_tensors_are_averaged_and_others_copied(record):
    assert len(record.steps) == 4
    names = [name for name, x in record.steps[0].items() if not x.is_floating_point()]
    assert any(name.endswith("kernel.sparse.index") for name in names), names
    for name, value in record.steps[-1].items():
        averaged = record.averaged[f"model.{name}"]
        if name in names:
            assert torch.equal(averaged, value), name
            continue
        expected = record.steps[0][name].double()
        for step in record.steps[1:]:
            expected = DECAY * expected + (1 - DECAY) * step[name].double()
        torch.testing.assert_close(averaged.double(), expected, rtol=1e-6, atol=1e-7)


def test_an_update_does_not_wait_for_the_device(tmp_path, monkeypatch):
    update = trainer.EMAWeightAveraging.on_train_batch_end

    def without_reading(*args):
        with NoReading():
            update(*args)

    monkeypatch.setattr(trainer.EMAWeightAveraging, "on_train_batch_end", without_reading)
    loop.train(listops(data_dir=str(tmp_path / "data"), ema=DECAY, epochs=1), tmp_path / "run", quiet=True)
