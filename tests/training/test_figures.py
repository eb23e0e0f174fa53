"""Figures of a run: learning curves, weights of the resolutions, merged kernels."""

import json
import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import mrconv
from mrconv.cli import main
from mrconv.training import figures

from ..conftest import randomise

METRICS = """epoch,step,lr,test/accuracy,test/loss,train/accuracy,train/loss,val/accuracy,val/loss
1,6,0.003,0.2,2.2,0.1,2.3,0.15,2.25
2,12,0.002,0.4,1.6,0.5,1.4,0.45,1.5
3,18,0.0,0.3,1.7,0.6,1.1,0.35,1.6
"""


def classifier(**options):
    shared = {"d_model": 4, "l_max": 32, "depth": 2, "kernel_size": 2, "d_input": 1, "n_classes": 3}
    return randomise(mrconv.SequenceClassifier(**shared | options)).eval()


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def run(tmp_path):
    (tmp_path / "metrics.csv").write_text(METRICS)
    result = {"name": "listops-base", "task": "listops", "best_epoch": 2, "partial": True}
    result["watched"] = "val/accuracy"  # codespell:ignore watched
    (tmp_path / "result.json").write_text(json.dumps(result))
    return tmp_path


@pytest.fixture
def saved(monkeypatch):
    """The saved figures."""
    saved_figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: saved_figures.append(self))
    return saved_figures


def test_alpha_is_averaged_over_channels_and_sums_to_one_over_resolutions():
    model = classifier()
    for i, layer in enumerate(figures.layers(model).values()):
        with torch.no_grad():
            layer.branches[0].alpha.zero_()
            layer.branches[0].alpha[i] = torch.tensor([1.0, -2.0, 3.0, 0.0])
            layer.branches[0].alpha[4] = torch.tensor([-0.5, 0.5, 0.5, 0.5])
    (shares,) = figures.alpha_magnitudes(model)
    np.testing.assert_allclose(shares, [[0.75, 0, 0, 0, 0.25], [0, 0.75, 0, 0, 0.25]])


def test_alpha_is_separate_for_each_direction():
    model = classifier(bidirectional=True)
    with torch.no_grad():
        for layer in figures.layers(model).values():
            layer.branches[1].alpha[1:] = 0
    forward, backward = figures.alpha_magnitudes(model)
    np.testing.assert_allclose(forward, 0.2)
    np.testing.assert_allclose(backward, [[1, 0, 0, 0, 0]] * 2)


def test_missing_resolutions_of_shorter_layers_are_nan():
    model = torch.nn.ModuleList([mrconv.MRConv(2, 8, kernel_size=2), mrconv.MRConv(2, 16, kernel_size=2)])
    (shares,) = figures.alpha_magnitudes(model)
    np.testing.assert_allclose(shares, [[1 / 3, 1 / 3, 1 / 3, math.nan], [0.25] * 4])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"norm": "none"}, "norm='none'"),
        ({"combine": "concat", "decay": 2.0}, "decay"),
        ({"merged": True}, "merged"),
        ({"kernel_size": 32}, "one resolution"),
    ],
)
def test_layers_without_alpha_raise(tmp_path, options, reason):
    with pytest.raises(ValueError, match=rf"backbone\.blocks\.0\.layer has no alpha to plot: .*{reason}"):
        figures.alpha_distribution(classifier(**options), tmp_path / "alpha.png")
    assert not list(tmp_path.iterdir())


def test_a_model_without_layers_raises():
    with pytest.raises(ValueError, match="the Linear has no MRConv layer to plot"):
        figures.layers(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kernel", ["fourier", "dilated"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_kernel_by_lag_is_the_response_to_an_impulse(bidirectional, kernel, merged):
    layer = mrconv.MRConv(3, 16, kernel=kernel, kernel_size=2, bidirectional=bidirectional)
    randomise(layer.double()).eval()
    if merged:
        layer.reparameterize()
    u = torch.zeros(1, 33, 3, dtype=torch.float64)
    silence = layer(u)
    u[:, 16] = 1
    response = (layer(u) - silence)[0].T.detach().numpy()
    if not merged:
        response[:, 16] -= layer.D.detach().numpy()
    lags, values = figures.kernel_by_lag(layer)
    assert lags.tolist() == list(range(-16 if bidirectional else 0, 16))
    np.testing.assert_allclose(values, response[:, 16 + lags.astype(int)], atol=1e-9)


def test_binning_keeps_the_largest_taps():
    kernel = np.zeros((2, 4096))
    kernel[0, 3000], kernel[1, 3001] = 1.0, -2.0
    edges, values = figures.binned(np.arange(4096.0), kernel)
    assert values.shape == (2, len(edges) - 1)
    assert values.shape[1] < 400
    assert (np.diff(edges) > 0).all()
    assert (edges[0], edges[-1]) == (0, np.log2(4097))
    assert (values.max(), values.min(), np.count_nonzero(values)) == (1, -2, 2)


def test_curves_show_every_split_the_best_epoch_and_the_paper(run, saved):
    figures.learning_curves(run, run / "curves.png")
    losses, accuracies = saved[0].axes
    lines = {line.get_label(): line for line in accuracies.lines}
    assert list(lines["test"].get_xdata()) == [1, 2, 3]
    np.testing.assert_allclose(lines["test"].get_ydata(), [20, 40, 30])
    np.testing.assert_allclose(lines["train"].get_ydata(), [10, 50, 60])
    np.testing.assert_allclose(lines["best: epoch 2"].get_xydata(), [[2, 45]])
    np.testing.assert_allclose(lines["paper, test: 62.40"].get_ydata(), 62.40)
    np.testing.assert_allclose(losses.lines[1].get_ydata(), [2.25, 1.5, 1.6])
    assert saved[0].get_suptitle() == "listops-base, partial"


def test_curves_without_validation_and_of_an_unfinished_run(tmp_path, saved):
    (tmp_path / "metrics.csv").write_text("epoch,test/accuracy,train/loss\n1,0.5,1.0\n2,,0.9\n")
    figures.learning_curves(tmp_path, tmp_path / "curves.png")
    losses, accuracies = saved[0].axes
    assert [line.get_label() for line in accuracies.lines] == ["test"]
    assert [line.get_label() for line in losses.lines] == ["train"]
    handles = saved[0].legends[0].get_texts()
    assert [text.get_text() for text in handles] == ["train", "test"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("epoch,val/loss\n", "has no lines"), ("epoch,val/loss\n1,low\n", "is not a metrics table of a run")],
)
def test_invalid_metrics_raise(tmp_path, text, message):
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"metrics\.csv {message}"):
        figures.learning_curves(tmp_path, tmp_path / "curves.png")


def test_the_alpha_figure_shows_the_shares_in_percent(tmp_path, saved):
    model = classifier(bidirectional=True)
    figures.alpha_distribution(model, tmp_path / "alpha.png")
    panels = saved[0].axes[:2]
    for axes, shares in zip(panels, figures.alpha_magnitudes(model), strict=True):
        np.testing.assert_allclose(axes.images[0].get_array(), 100 * shares)
        assert [text.get_text() for text in axes.get_xticklabels()] == ["0\n2", "1\n4", "2\n8", "3\n16", "4\n32"]
    assert [axes.get_title() for axes in panels] == ["forward kernels", "backward kernels"]


def test_figures_are_saved_in_the_run_folder(run):
    classifier(bidirectional=True).save_pretrained(run / "model")
    paths = figures.draw_run(run)
    assert paths == [run / "figures" / f"{name}.png" for name in ("curves", "alpha", "kernels")]
    assert all(map(is_png, paths))


def test_figures_without_data_are_omitted(tmp_path, capsys):
    model = mrconv.TwoTowerClassifier(
        d_model=4, l_max=32, depth=1, kernel_size=4, vocab_size=5, n_classes=2, combine="concat", decay=2.0
    )
    model.save_pretrained(tmp_path / "model")
    assert main(["plot", str(tmp_path), "--out", str(tmp_path / "elsewhere")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'elsewhere' / 'kernels.png'}\n"
    assert is_png(tmp_path / "elsewhere" / "kernels.png")


def test_kernels_of_merged_models_are_plotted(tmp_path):
    figures.merged_kernels(mrconv.reparameterize(classifier()), tmp_path / "kernels.png")
    assert is_png(tmp_path / "kernels.png")


def test_a_folder_that_is_not_a_run_is_reported_in_one_line(tmp_path, capsys):
    for folder, message in ((tmp_path, "is not a run folder"), (tmp_path / "none", "is not a folder")):
        with pytest.raises(SystemExit) as stop:
            main(["plot", "run", str(folder)])
        err = capsys.readouterr().err
        assert stop.value.code == 2
        assert f"{folder} {message}" in err
        assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())
