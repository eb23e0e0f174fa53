"""The benchmarks run on small shapes, tell what they should, and their records can be drawn."""

import json
import math
import runpy
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from mrconv.bench import candidates as contestants
from mrconv.bench import charts as plot
from mrconv.bench import image_models as vision
from mrconv.bench import mixer_comparison as compare
from mrconv.bench import shapes, timing
from mrconv.bench.options import PASSES
from mrconv.cli import main
from tests.conftest import relative

ROOT = Path(__file__).parent.parent
LAYERS = [
    shapes.Shape("Tiny fourier", 2, 64, 4, "fourier", 2),
    shapes.Shape("Tiny dilated", 2, 64, 4, "dilated", 8),
    shapes.Shape("Other", 2, 64, 4, "fourier", 8, True, "concat"),
]
MODELS = [
    shapes.ModelShape("Tiny", 2, 64, 4, "fourier", 2, depth=2),
    shapes.ModelShape("Image", 2, 64, 4, "dilated", 8, depth=1, block_norm="layer"),
]
KEYS = {"ms", "graph_ms", "MiB"}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    before, threads = (list(shapes.LAYERS), list(shapes.MODELS)), torch.get_num_threads()
    torch.set_num_threads(1)
    shapes.LAYERS[:], shapes.MODELS[:] = LAYERS, MODELS
    monkeypatch.setattr(shapes, "lengths", lambda device, small: [(8, 32, 2), (4, 64, 2), (2, 128, 2)])
    yield
    shapes.LAYERS[:], shapes.MODELS[:] = before
    torch.set_num_threads(threads)


def bench(tmp_path, *argv):
    """Run a benchmark on the CPU and return its record."""
    file = tmp_path / "results" / "found.json"
    assert main(["bench", *argv, "--device", "cpu", "--rounds", "1", "--out", str(file)]) == 0
    return json.loads(file.read_text())


def check_record(found, name):
    assert found["benchmark"] == name
    assert found["command"].startswith(f"mrconv bench {name}")
    assert {
        "hardware",
        "threads",
        "python",
        "torch",
        "triton",
        "cuda",
        "mrconv",
        "revision",
        "dtype",
        "rounds",
    } <= found.keys()
    assert found["copy_bytes_per_s"] > 0
    for row in found["rows"]:
        for each in PASSES:
            for result in row[each].values():
                assert result.keys() >= KEYS
                assert result["ms"] > 0
                assert result["graph_ms"] is None
                assert result["MiB"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer(tmp_path, capsys, dtype):
    found = bench(tmp_path, "layer", "--dtype", dtype)
    check_record(found, "layer")
    assert found["dtype"] == dtype
    assert [row["shape"]["name"] for row in found["rows"]] == [shape.name for shape in LAYERS]
    for row in found["rows"]:
        assert set(row["training"]) == set(row["forward"]) == {"ours", "branches", "dense"}
        assert set(row["inference"]) == {"merged", "dense"}
        assert row["floor_ms"]["training"] > row["floor_ms"]["inference"] > 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["ours", "branches", "dense", "floor", "x", "branches", "x", "dense"]
    assert sum(line.startswith("Tiny") for line in out.splitlines()) == 2
    assert "error" not in out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model(tmp_path, capsys, dtype):
    precision = torch.get_float32_matmul_precision()
    found = bench(tmp_path, "model", "--dtype", dtype)
    check_record(found, "model")
    assert torch.get_float32_matmul_precision() == precision
    for row in found["rows"]:
        assert set(row["training"]) == set(row["forward"]) == {"none", "ours", "branches", "dense"}
        assert set(row["inference"]) == {"none", "merged", "dense"}
    out = capsys.readouterr().out
    assert "not in this run" in out
    assert ("59.30" if dtype == "float32" else "41.50") in out
    assert found["anchors_ms"]["training"]["Image"] == (59.3 if dtype == "float32" else 41.5)


def test_small_models_are_not_compared_with_full_ones(tmp_path, capsys):
    found = bench(tmp_path, "model", "--small", "--only", "image")
    assert "anchors_ms" not in found
    assert "S4" not in capsys.readouterr().out
    assert [row["shape"]["batch"] for row in found["rows"]] == [1]


def test_compiling_that_fails_is_recorded(tmp_path, monkeypatch):
    def broken(module):
        class Broken(nn.Module):
            def forward(self, u):
                raise RuntimeError("no compiler here\nand more")

        return Broken()

    monkeypatch.setattr(torch, "compile", broken)
    found = bench(tmp_path, "model", "--compile", "--only", "Image")
    for name, result in found["rows"][0]["training"].items():
        assert result["ms"] > 0
        if name in ("none", "ours"):
            assert result["compile_ms"] is None
            assert result["compile_error"] == "no compiler here"


def test_compiled_times_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module: module)
    found = bench(tmp_path, "model", "--compile", "--only", "Image", "--pass", "inference")
    assert "training" not in found["rows"][0]
    assert all(found["rows"][0]["inference"][name]["compile_ms"] > 0 for name in ("none", "merged"))


def test_length_can_be_plotted(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    found = bench(tmp_path, "length", "--only", "fourier", "dense")
    check_record(found, "length")
    assert [row["shape"]["length"] for row in found["rows"]] == [32, 64, 128]
    assert set(found["rows"][0]["training"]) == {"fourier l0=1", "fourier l0=32", "dense"}
    file = tmp_path / "results" / "found.json"
    found["rows"][1]["training"]["dense"]["ms"] = None
    file.write_text(json.dumps(found))
    capsys.readouterr()
    other = tmp_path / "new" / "figure.png"
    for image, argv in ((file.with_suffix(".png"), []), (other, ["--out", str(other)])):
        assert main(["plot", "length", str(file), *argv]) == 0
        assert image.read_bytes().startswith(b"\x89PNG")
        assert capsys.readouterr().out == f"{image}\n"


def test_plotting_needs_matplotlib(tmp_path, capsys, monkeypatch):
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"benchmark": "length", "rows": [{}]}))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "mrconv.bench.charts", raising=False)
    with pytest.raises(SystemExit) as stop:
        main(["plot", "length", str(file)])
    assert stop.value.code == 2
    assert "pip install 'mrconv[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["layer", "model", "length"])
def test_scripts_are_the_same_commands(capsys, monkeypatch, name):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="__main__")
    assert stop.value.code == 0
    assert f"usage: mrconv bench {name}" in capsys.readouterr().out


@pytest.mark.parametrize("kernel", ["dilated", "fourier"])
def test_the_paper_s_way_computes_what_the_layer_does(kernel):
    shape = shapes.Shape("", 2, 64, 4, kernel, 8)
    theirs = contestants.branches(shape, "cpu")
    ours = contestants.layer(shape, "torch", "cpu")
    layer = theirs.layer if isinstance(theirs, contestants.DilatedBranches) else theirs
    ours.load_state_dict(layer.state_dict())
    u = torch.randn(2, 64, 4)
    assert relative(theirs(u), ours(u)) < 1e-5


def test_what_does_not_fit_is_left_out(monkeypatch):
    monkeypatch.setattr(contestants, "cpu_memory", lambda: 2.0**10)
    u = torch.randn(2, 64, 4)
    runs = contestants.runs("training", {"branches": contestants.branches(LAYERS[0], "cpu")}, u, u)
    result = timing.measure(runs, 1, "cpu")["branches"]
    assert result == {"ms": None, "graph_ms": None, "MiB": None, "error": "needs about 0 GiB"}


def test_graphs_are_timed_too_and_one_that_cannot_be_captured_is_null(monkeypatch):
    def capture(run, pool, side):
        assert (pool, side) == ("one for all", "and its stream")
        if run is bad:
            raise RuntimeError("not permitted when stream is capturing\nand more")
        return run

    def bad():
        return None

    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: "one for all")
    monkeypatch.setattr("torch.cuda.Stream", lambda: "and its stream")
    monkeypatch.setattr(timing, "captured", capture)
    monkeypatch.setattr(timing, "synchronise", lambda device: None)
    monkeypatch.setattr(timing, "first_steps", lambda run, device: 1.0)
    found = timing.measure({"good": lambda: None, "bad": bad}, 3, "cuda")
    assert found["good"]["graph_ms"] > 0
    assert found["bad"]["ms"] > 0
    assert found["bad"]["graph_ms"] is None
    assert found["bad"]["graph_error"] == "not permitted when stream is capturing"


def test_peak_memory_counts_what_lives_at_the_same_time():
    def run():
        a = torch.empty(2**20)
        b = a + 1
        del a
        return b.sum()

    assert timing.first_steps(run, "cpu") == pytest.approx(8, rel=0.01)


def test_all_lengths_have_the_same_number_of_elements(monkeypatch):
    monkeypatch.undo()
    for device, small, longest in (("cuda", False, 2**20), ("cpu", False, 2**20), ("cpu", True, 2**16)):
        found = shapes.lengths(device, small)
        assert [length for _, length, _ in found] == [2**i for i in range(8, longest.bit_length())]
        assert len({batch * length * channels for batch, length, channels in found}) == 1


def test_mixers_are_compared_in_the_same_block(tmp_path, capsys):
    found = bench(tmp_path, "compare", "--mixers", "s4", "mamba", "--only", "Image")
    assert set(found["rows"][0]["training"]) == {"ours", "large", "s4", "mamba"}
    assert set(found["rows"][0]["inference"]) == {"ours", "merged", "large", "large merged", "s4", "mamba"}
    assert all(result["ms"] > 0 for each in PASSES for result in found["rows"][0][each].values())
    told = capsys.readouterr().out
    assert told.splitlines()[0].split() == ["ours", "merged", "large", "large", "merged", "s4", "mamba"]
    assert [told.count(line) for line in ("examples/s", "speed / S4's")] == [len(PASSES)] * 2
    batch, results = found["rows"][0]["shape"]["batch"], found["rows"][0]["inference"]
    assert results["merged"]["examples_per_s"] == pytest.approx(1e3 * batch / results["merged"]["ms"])
    assert results["merged"]["beside_s4"] == pytest.approx(results["s4"]["ms"] / results["merged"]["ms"])


def test_mixers_are_compared_compiled(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda block: compiled.append(block.layer) or block)
    found = bench(tmp_path, "compare", "--mixers", "s4d", "--only", "1K", "--pass", "inference", "--compile")
    assert {type(layer).__name__ for layer in compiled} == {"MRConv", "S4D"}
    assert all(result["compile_ms"] > 0 for result in found["rows"][0]["inference"].values())


def test_a_mixer_that_cannot_do_what_a_shape_asks_says_why():
    shape = shapes.ModelShape("Both", 2, 64, 4, "fourier", 2, bidirectional=True, depth=1)
    with pytest.raises(RuntimeError, match="multiresconv runs forwards only"):
        compare._attempted(shape, "multiresconv", "cpu")(torch.zeros(2, 64, 4))


def test_an_unknown_mixer_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "compare", "--mixers", "s4e", "--device", "cpu"])
    assert "argument --mixers: mixer must be one of" in capsys.readouterr().err


def compared(names):
    """Return a record of `mrconv bench compare` with made-up times."""

    def row(shape):
        times = {name: {"ms": 2.0 + i, "graph_ms": 1.0 + i, "MiB": 1.0} for i, name in enumerate(names)}
        return {
            "shape": asdict(shape),
            "training": {"ours": times["s4"]} | times,
            "inference": {"ours": times["s4"], "merged": times["s4"]} | times,
        }

    rows = [row(shape) for shape in (*MODELS, *shapes.LENGTHS)]
    return {"benchmark": "compare", "device": "cuda", "hardware": "GPU", "dtype": "float32", "rows": rows}


@pytest.mark.parametrize("part", ["both", "shapes", "lengths", "inference"])
def test_mixers_can_be_plotted(tmp_path, capsys, part):
    found = compared(["s4", "mamba", "attention"])
    if part == "shapes":
        found["rows"] = found["rows"][: len(MODELS)]
    elif part == "lengths":
        found["rows"] = found["rows"][len(MODELS) :]
    elif part == "inference":
        for row in found["rows"]:
            del row["training"]
            row["inference"]["attention"] = {"ms": None, "graph_ms": None, "MiB": None, "error": "too large"}
    file = tmp_path / "found.json"
    file.write_text(json.dumps(found))
    assert main(["plot", "compare", str(file)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'found.png'}\n"
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


def test_the_bars_are_speeds_beside_s4s():
    from matplotlib.figure import Figure

    times = plot.best_times({"ours": {"ms": 4.0, "graph_ms": 1.0}, "s4": {"ms": 2.0}, "mega": {"ms": None}})
    assert times == pytest.approx({"mrconv": 1.0, "s4": 2.0, "mega": math.nan}, nan_ok=True)
    axes = Figure().subplots()
    plot._bars(axes, times)
    assert [bar.get_width() for bar in axes.patches][1:] == [1.0, 2.0]
    assert [text.get_text() for text in axes.texts] == ["–", "1", "2"]


def test_a_comparison_without_s4_is_refused(tmp_path, capsys):
    file = tmp_path / "found.json"
    for change in (lambda row: row["training"].pop("s4"), lambda row: (row.pop("training"), row.pop("inference"))):
        found = compared(["s4", "mamba"])
        for row in found["rows"]:
            change(row)
        file.write_text(json.dumps(found))
        with pytest.raises(SystemExit):
            main(["plot", "compare", str(file)])
        assert "has no times of S4 in training or inference" in capsys.readouterr().err


def test_generation_is_measured(tmp_path, capsys, monkeypatch):
    file = tmp_path / "found.json"
    arguments = ["--histories", "32", "48", "--d-model", "8", "--depth", "1", "--out", str(file)]
    monkeypatch.setattr(sys, "argv", ["generation.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "benchmarks" / "generation.py"), run_name="__main__")
    assert stop.value.code == 0
    found = json.loads(file.read_text())
    assert [row["history"] for row in found["rows"]] == [32, 48]
    for row in found["rows"]:
        assert row["attention"]["tokens_per_s"] == pytest.approx(1000 / row["attention"]["ms"])
        assert row["merged, recomputed"]["ms"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vision(tmp_path, capsys, monkeypatch, dtype):
    monkeypatch.setattr(shapes, "VISION", [shapes.VisionShape("T", "tiny", reduced=True, batch=1)])
    argv = ["vision", "--dtype", dtype, "--pass", "training", "inference", "--batch", "1"]
    found = bench(tmp_path, *argv)
    (row,) = found["rows"]
    assert row["batch"] == {"training": 1, "inference": 1}
    assert list(row["training"]) == ["ours", "branches", "ConvNeXt"]
    assert list(row["inference"]) == ["merged", "branches", "torch FFT", "ConvNeXt"]
    assert all(result["ms"] > 0 for each in row["batch"] for result in row[each].values())
    out = capsys.readouterr().out
    assert "T, inference, batch 1, images/s" in out
    assert "error" not in out
    assert main(["plot", "vision", str(tmp_path / "results" / "found.json")]) == 0
    assert (tmp_path / "results" / "found.png").stat().st_size > 1000


def test_vision_models_compute_the_same_by_every_way():
    shape = shapes.VisionShape("T", "tiny", batch=1, reduced=True)
    models = vision.contestants(shape, "inference", vision.Options())
    x = vision.pictures(shape, "inference", 1, vision.Options())
    with torch.no_grad():
        models["merged"].load_state_dict(models["torch FFT"].state_dict())
        assert relative(models["merged"](x), models["torch FFT"](x)) < 1e-5
    copied = vision.by_block(models["ConvNeXt"])
    compiled = [m for m in copied.modules() if m._compiled_call_impl is not None]
    assert len(compiled) == 4
    assert not any(m._compiled_call_impl for m in models["ConvNeXt"].modules())


def test_vision_without_timm_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    model = vision._timm("convnext_tiny")
    with pytest.raises(RuntimeError, match="timm cannot be imported: import of timm halted"):
        model(torch.zeros(1))
