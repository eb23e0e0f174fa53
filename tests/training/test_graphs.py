"""Training steps replayed as CUDA graphs give the same results as eager steps."""

import pytest
import torch

from mrconv.tasks import ResidentLoader
from mrconv.training import loop
from mrconv.training.cuda_graphs import GraphedStep
from mrconv.training.module import build_model, logits

from .miniature import data, listops, small

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_gradients_buffers_and_random_numbers_are_those_of_eager_steps():
    tiny = data("listops", 64)
    experiment = small(listops(dropout=0.2))
    batches = list(ResidentLoader(tiny, "train", 4, pad=8, device="cuda"))
    assert len({b.x.shape for b in batches}) > 1
    results = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = build_model(experiment, tiny).cuda()

        def step(batch, model=model):
            loss = torch.nn.functional.cross_entropy(logits(model, batch), batch.y)
            loss.backward()
            return (loss.detach(),)

        run_step = GraphedStep(step, model) if graphed else step
        torch.cuda.manual_seed(1)
        for batch in batches:
            if not graphed:
                model.zero_grad()
            (loss,) = run_step(batch)
            results.append(
                (loss.clone(), [p.grad.clone() for p in model.parameters()], [b.clone() for b in model.buffers()])
            )
    for eager, graph in zip(results[: len(batches)], results[len(batches) :], strict=True):
        for a, b in zip((eager[0], *eager[1], *eager[2]), (graph[0], *graph[1], *graph[2]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_with_graphs_ends_with_the_weights_of_an_eager_run(tmp_path, monkeypatch, precision):
    tiny = data("listops", 64)
    monkeypatch.setattr(loop, "prepare", lambda *_: tiny)
    weights = []
    for graphs in (False, True):
        options = {"accelerator": "gpu", "limit_train": 0, "dropout": 0.0, "epochs": 3, "pad": 16}
        loop.train(small(listops(), graphs=graphs, precision=precision, **options), tmp_path / str(graphs), quiet=True)
        weights.append(torch.load(tmp_path / str(graphs) / "last.ckpt", weights_only=True)["state_dict"])
    tolerance = 1e-3 if precision == "float32" else 5e-2
    for name, a in weights[0].items():
        if a.is_floating_point() and name.startswith("model."):
            assert (a - weights[1][name]).norm() <= tolerance * (1 + a.norm()), name
