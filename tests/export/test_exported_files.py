"""Exported files give the model's outputs without mrconv, and a wrong file is never written."""

import contextlib
import io
import itertools
import shutil
import subprocess
import sys

import onnx
import onnxruntime
import pytest
import torch

from mrconv import (
    LanguageModel,
    MRConvNeXt,
    SequenceClassifier,
    SequenceLabeller,
    SequenceRegressor,
    TwoTowerClassifier,
)
from mrconv.cli import main
from mrconv.export import FORMATS, ExportFailed, export, plain_ops

from ..conftest import randomise, relative, slow_except

KERNEL_SIZES = {"dense": 40, "dilated": 2, "fourier": 3, "sparse": 2, "fourier+sparse": 2}
LAYERS = {name: {"kernel": name, "kernel_size": size} for name, size in KERNEL_SIZES.items()} | {
    "concat": {"kernel": "fourier", "kernel_size": 4, "combine": "concat", "decay": (0.5, 2.0)},
    "bidirectional": {"kernel": "fourier", "kernel_size": 3, "bidirectional": True},
    "dilated, bidirectional": {"kernel": "dilated", "kernel_size": 2, "bidirectional": True},
    "heads and groups": {"kernel": "fourier", "kernel_size": 2, "heads": 2, "groups": 2},
    "short": {"kernel": "fourier", "kernel_size": 2, "l_max": 30},
}
CAUSAL = ["dilated", "fourier", "heads and groups"]
compiler = pytest.mark.skipif(not shutil.which("g++"), reason="AOTInductor needs a C++ compiler")


def build(cls=SequenceClassifier, **options):
    values = {"d_model": 4, "depth": 1, "l_max": 300, "d_input": 2}
    if cls is SequenceClassifier:
        values["n_classes"] = 3
    return randomise(cls(**(values | options))).eval()


def session(path):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options)


@pytest.mark.parametrize("layer", slow_except(LAYERS, "fourier"))
def test_onnx_equals_the_trained_model(tmp_path, layer):
    model = build(**LAYERS[layer])
    before = {name: x.clone() for name, x in model.state_dict().items()}
    exported = export(model, tmp_path / "model.onnx", "onnx")
    assert exported.error < 1e-4
    assert {domain.domain for domain in onnx.load(exported.path).opset_import} == {""}
    run = session(exported.path)
    assert [x.shape for x in run.get_inputs()] == [["batch", "length", 2]]
    for batch, length in ((1, 29), (4, 17)):
        x = torch.randn(batch, length, 2)
        assert relative(torch.tensor(run.run(["output"], {"x": x.numpy()})[0]), model(x)) < 1e-4
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.slow
def test_onnx_rejects_inputs_beyond_the_exported_length(tmp_path):
    run = session(export(build(kernel="fourier", kernel_size=3), tmp_path / "model.onnx", length=150).path)
    assert run.run(None, {"x": torch.randn(1, 150, 2).numpy()})[0].shape == (1, 3)
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        run.run(None, {"x": torch.randn(1, 151, 2).numpy()})


@pytest.mark.parametrize("layer", slow_except(["short", "dilated", "sparse"], "sparse"))
def test_onnx_without_ffts_is_exact_beyond_the_exported_length(tmp_path, layer):
    model = build(**LAYERS[layer])
    run = session(export(model, tmp_path / "model.onnx", length=20).path)
    for length in (20, 50, 400):
        x = torch.randn(2, length, 2)
        assert relative(torch.tensor(run.run(None, {"x": x.numpy()})[0]), model(x)) < 1e-4


@pytest.mark.slow
def test_a_torch_file_rejects_inputs_beyond_the_exported_length(tmp_path):
    model, x = build(**LAYERS["sparse"]), torch.randn(2, 400, 2)
    loaded = torch.export.load(export(model, tmp_path / "model.pt2", "torch", length=20).path).module()
    with pytest.raises(Exception, match=r"20"):
        loaded(x)


@pytest.mark.parametrize("length", slow_except([1, 50], 50))
def test_onnx_of_a_length_below_the_kernels_reach_rejects_longer_inputs(tmp_path, length):
    run = session(export(build(l_max=100, kernel_size=4), tmp_path / "model.onnx", length=length).path)
    for longer in (length + 1, 80, 250):
        with pytest.raises(Exception, match="ONNXRuntimeError"):
            run.run(None, {"x": torch.randn(1, longer, 2).numpy()})


def test_a_model_that_is_zero_everywhere_is_exported(tmp_path):
    model = build()
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    assert export(model, tmp_path / "model.pt2", "torch").error == 0


@pytest.mark.parametrize("layer", slow_except(LAYERS, "dilated, bidirectional"))
def test_torch_export_equals_the_trained_model(tmp_path, layer):
    model = build(**LAYERS[layer])
    assert export(model, tmp_path / "model.pt2", "torch").error < 1e-4
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for batch, length in ((1, 29), (4, 17)):
        x = torch.randn(batch, length, 2)
        assert relative(loaded(x), model(x)) < 1e-4


MODELS = {
    "two towers": (TwoTowerClassifier, {"vocab_size": 5, "d_input": None}, 2),
    "labeller": (SequenceLabeller, {"n_classes": 3}, 1),
    "regressor": (SequenceRegressor, {"n_outputs": 2}, 1),
    "language model": (LanguageModel, {"vocab_size": 5, "d_input": None}, 1),
    "masked classifier": (SequenceClassifier, {"mask_padding": True, "prenorm": True, "block_norm": "layer"}, 1),
}


@pytest.mark.parametrize("name", slow_except(MODELS, "two towers"))
def test_every_model_with_padding(tmp_path, name):
    cls, options, sequences = MODELS[name]
    model = build(cls, **options)
    export(model, tmp_path / "model.pt2", "torch", padded=True, length=50)
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    tokens = "vocab_size" in options
    inputs = [torch.randint(5, (3, 20)) if tokens else torch.randn(3, 20, 2) for _ in range(sequences)]
    lengths = [torch.tensor(ends) for ends in ([20, 1, 7], [5, 20, 9])[:sequences]]
    assert relative(loaded(*inputs, *lengths), model(*inputs, *lengths)) < 1e-4


@pytest.mark.slow
def test_two_towers_with_padding_as_onnx(tmp_path):
    model = build(TwoTowerClassifier, vocab_size=5, d_input=None, l_max=30, mask_padding=True)
    export(model, tmp_path / "model.onnx", "onnx", padded=True)
    names = [x.name for x in session(tmp_path / "model.onnx").get_inputs()]
    assert names == ["first", "second", "first_lengths", "second_lengths"]


@pytest.mark.parametrize("layer", slow_except(CAUSAL, "fourier"))
def test_an_onnx_step_equals_the_parallel_form_far_past_the_window(tmp_path, layer):
    model = build(**(LAYERS[layer] | {"l_max": 40}))
    export(model, tmp_path / "step.onnx", "onnx", step=True)
    run = session(tmp_path / "step.onnx")
    state = {x.name: torch.zeros([2, *x.shape[1:]]).numpy() for x in run.get_inputs()[1:]}
    state = {name: x.astype("float64") if x.ndim < 3 else x for name, x in state.items()}
    x = torch.randn(2, 130, 2)
    for t in range(130):
        output, *after = run.run(None, {"x": x[:, t].numpy(), **state})
        state = dict(zip(state, after, strict=True))
        if t in (0, 1, 63, 129):
            assert relative(torch.tensor(output), model(x[:, : t + 1])) < 1e-4
    assert [y.name for y in run.get_outputs()] == ["output", *(f"next_{name}" for name in state)]


@compiler
@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_aoti_equals_the_trained_model(tmp_path, layer):
    assert export(build(**LAYERS[layer]), tmp_path / "model.aoti.pt2", "aoti").error < 1e-4


@compiler
@pytest.mark.slow
@pytest.mark.parametrize("layer", CAUSAL)
def test_an_aoti_step_equals_the_parallel_form(tmp_path, layer):
    assert export(build(**LAYERS[layer]), tmp_path / "step.aoti.pt2", "aoti", step=True).error < 1e-4


@pytest.fixture(scope="module")
def commanded(tmp_path_factory):
    """A model, the folder in which the command wrote both of its forms, and what it printed for the first."""
    folder, model, printed = tmp_path_factory.mktemp("commanded"), build(), io.StringIO()
    model.save_pretrained(folder / "model")
    with contextlib.redirect_stdout(printed):
        assert main(["export", str(folder), "--format", "torch"]) == 0
    step = str(folder / "other.pt2")
    assert main(["export", str(folder / "model"), "--format", "torch", "--step", "--out", step]) == 0
    return model, folder, printed.getvalue()


def test_the_command_takes_a_run_or_a_saved_model(commanded):
    _, run, printed = commanded
    assert printed.startswith(f"{run / 'model.pt2'}: 0.")
    assert "largest relative difference from PyTorch: " in printed
    assert "1 x 300, 3 x 150, 2 x 1" in printed
    assert (run / "other.pt2").exists()


def test_torch_files_load_without_mrconv(commanded):
    (model, folder, _), x = commanded, torch.randn(3, 11, 2)
    torch.save((x, model(x).detach()), folder / "expected.pt")
    code = """
import sys, torch
sys.modules["mrconv"] = None
x, expected = torch.load("expected.pt")
assert torch.allclose(torch.export.load("model.pt2").module()(x), expected, atol=1e-4)
step = torch.export.load("other.pt2").module()
state = [torch.zeros(3, 300, 4), torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
for t in range(11):
    y, *state = step(x[:, t], *state)
assert torch.allclose(y, expected, atol=1e-4)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=folder)


@pytest.mark.slow
def test_a_fixed_length_and_a_length_beyond_the_reach(tmp_path):
    model = build(l_max=30)
    assert export(model, tmp_path / "a.pt2", "torch", fixed=True, length=50).checked == [(1, 50), (3, 50)]
    with pytest.raises(AssertionError):
        torch.export.load(tmp_path / "a.pt2").module()(torch.randn(1, 49, 2))
    assert export(model, tmp_path / "b.pt2", "torch", length=400).checked == [(1, 400), (3, 200), (2, 1)]


@pytest.mark.parametrize(
    ("dtype", "limit"),
    slow_except([("bfloat16", 5e-2), ("float16", 1e-2), ("float64", 1e-5)], ("bfloat16", 5e-2)),
)
def test_other_dtypes(tmp_path, dtype, limit):
    exported = export(build(vocab_size=5, d_input=None), tmp_path / "model.pt2", "torch", dtype=dtype)
    assert exported.error < limit
    assert torch.export.load(exported.path).module()(torch.zeros(1, 3, dtype=torch.long)).dtype == getattr(torch, dtype)


def off_by_one(u, values, lags, bias, gelu, *rest, right=plain_ops.convolve):
    return right(u, values.roll(1, 1), lags, bias, gelu, *rest)


def nan_outputs(u, *rest):
    return u * torch.nan


@pytest.mark.parametrize(
    ("format", "wrong"),
    slow_except([("onnx", off_by_one), ("torch", off_by_one), ("torch", nan_outputs)], ("torch", nan_outputs)),
)
def test_a_wrong_export_raises_and_writes_no_file(tmp_path, monkeypatch, capsys, format, wrong):
    model = build(l_max=30)
    model.save_pretrained(tmp_path / "saved")
    out = tmp_path / "out" / "model"
    monkeypatch.setattr(plain_ops, "convolve", wrong)
    with pytest.raises(SystemExit) as stop:
        main(["export", str(tmp_path / "saved"), "--format", format, "--out", str(out)])
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert f"the outputs of the {format} file differ from the model's by a relative error of" in printed.err
    assert not printed.out
    assert list(out.parent.iterdir()) == []
    out.write_text("an older file")
    with pytest.raises(ExportFailed):
        export(model, out, format)
    assert out.read_text() == "an older file"


def inaccurate():
    """A model whose float32 outputs have errors above 1e-4: large numbers cancel in its head."""
    model = build(SequenceLabeller, n_classes=3, l_max=30)
    with torch.no_grad():
        model.backbone.blocks[0].norm.bias += 3e3
        model.head.weight -= model.head.weight.mean(1, keepdim=True)
    return model


def test_a_model_with_large_errors_of_rounding_is_exported_with_the_same_error_every_time(tmp_path):
    model, errors = inaccurate(), set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        errors.add(export(model, tmp_path / "model.pt2", "torch").error)
    assert len(errors) == 1
    assert 1e-4 < errors.pop() < 0.1


def test_a_wrong_export_of_a_model_with_large_errors_of_rounding_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_ops, "convolve", off_by_one)
    with pytest.raises(ExportFailed, match=r"the limit is [1-9]e-0[123];"):
        export(inaccurate(), tmp_path / "model.pt2", "torch")


def test_baselines_are_exported_or_rejected_with_the_reason(tmp_path):
    export(build(mixer="attention", l_max=20), tmp_path / "attention.pt2", "torch")
    with pytest.raises(ExportFailed, match=r"mixer='s4d' cannot be exported as torch: .* fixed=True"):
        export(build(mixer="s4d", l_max=20), tmp_path / "s4d.pt2", "torch")
    assert {path.name for path in tmp_path.iterdir()} == {"attention.pt2"}


@pytest.mark.slow
def test_a_baseline_is_exported_with_a_fixed_length(tmp_path):
    s4d = build(mixer="s4d", l_max=20)
    export(s4d, tmp_path / "s4d.pt2", "torch", fixed=True)
    with pytest.raises(ExportFailed, match=r"mixer='s4d' cannot be exported as onnx: .*No ONNX function found"):
        export(s4d, tmp_path / "s4d.onnx", "onnx", fixed=True)
    assert {path.name for path in tmp_path.iterdir()} == {"s4d.pt2"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere", "--format", "torch"], "/nowhere does not exist"),
        (["{saved}"], "required: --format"),
        (["{saved}", "--format", "tflite"], "'tflite'"),
        (["{saved}", "--format", "onnx", "--dtype", "bfloat16"], "needs device='cpu' and dtype float32 or float16"),
        (["{saved}", "--format", "torch", "--step", "--length", "5"], "step=True exports one position"),
        (["{saved}", "--format", "torch", "--length", "0"], "argument --length: must be a positive integer"),
        (["{saved}", "--format", "torch", "--out", "/dev/null/x"], "/dev/null"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_reported(tmp_path, capsys, arguments, message):
    build(l_max=20).save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["export", *(word.format(saved=tmp_path) for word in arguments)])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named(tmp_path, capsys, monkeypatch, package):
    build(l_max=20).save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path), "--format", "onnx"])
    assert f"--format onnx needs {package}: install mrconv with its extra 'export'" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.onnx"))


@pytest.mark.parametrize(
    ("kernel", "format"),
    slow_except(
        list(itertools.product(["fourier", "fourier+sparse", "dilated"], ["onnx", "torch"])), ("fourier", "torch")
    ),
)
def test_images(kernel, format, tmp_path):
    stages = {"depths": (1, 1), "dims": (4, 8), "kernel_sizes": (4, 2), "patch_size": 2, "layer_scale": 1.0}
    model = randomise(MRConvNeXt(n_classes=3, image_size=16, kernel=kernel, **stages)).eval()
    exported = export(model, tmp_path / f"file{FORMATS[format].suffix}", format)
    assert exported.error < 1e-4
    assert [batch for batch, _ in exported.checked] == [1, 3]
    with pytest.raises(ValueError, match="images have one size"):
        export(model, tmp_path / "file", format, step=True)
