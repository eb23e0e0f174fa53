"""The benchmarks run on small shapes, print and record what they should, and their records can be drawn."""

import json
import math
import runpy
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from mrconv.bench import candidates, charts, image_models, mixer_comparison, shapes, timing
from mrconv.bench.options import PASSES, TIMINGS, Options
from mrconv.cli import main
from tests.conftest import relative, slow_except

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
    file = tmp_path / "results" / "record.json"
    assert main(["bench", *argv, "--device", "cpu", "--rounds", "1", "--out", str(file)]) == 0
    return json.loads(file.read_text())


def check_record(record, name):
    assert record["benchmark"] == name
    assert record["command"].startswith(f"mrconv bench {name}")
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
    } <= record.keys()
    assert record["copy_bytes_per_s"] > 0
    for row in record["rows"]:
        for each in PASSES:
            for result in row[each].values():
                assert result.keys() >= KEYS
                assert result["ms"] > 0
                assert result["graph_ms"] is None
                assert result["MiB"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer(tmp_path, capsys, dtype):
    record = bench(tmp_path, "layer", "--dtype", dtype)
    check_record(record, "layer")
    assert record["dtype"] == dtype
    assert [row["shape"]["name"] for row in record["rows"]] == [shape.name for shape in LAYERS]
    for row in record["rows"]:
        assert set(row["training"]) == set(row["forward"]) == {"ours", "branches", "dense"}
        assert set(row["inference"]) == {"merged", "dense"}
        assert row["bandwidth_bound_ms"]["training"] > row["bandwidth_bound_ms"]["inference"] > 0
    out = capsys.readouterr().out
    columns = ["ours", "branches", "dense", "bandwidth", "bound", "x", "branches", "x", "dense"]
    assert out.splitlines()[0].split() == columns
    assert sum(line.startswith("Tiny") for line in out.splitlines()) == 2
    assert "error" not in out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model(tmp_path, capsys, dtype):
    precision = torch.get_float32_matmul_precision()
    record = bench(tmp_path, "model", "--dtype", dtype)
    check_record(record, "model")
    assert torch.get_float32_matmul_precision() == precision
    for row in record["rows"]:
        assert set(row["training"]) == set(row["forward"]) == set(shapes.STACKS)
        assert set(row["inference"]) == {"none", "merged", "dense", "longconv"}
    out = capsys.readouterr().out
    assert "not in this run" in out
    assert ("59.30" if dtype == "float32" else "41.50") in out
    assert record["anchors_ms"]["training"]["Image"] == (59.3 if dtype == "float32" else 41.5)


def test_some_mixers_of_stacks_can_be_chosen(tmp_path):
    record = bench(
        tmp_path, "model", "--only", "Image", "--mixers", "ours", "longconv", "--pass", "training", "inference"
    )
    row = record["rows"][0]
    assert (set(row["training"]), set(row["inference"])) == ({"ours", "longconv"}, {"merged", "longconv"})
    assert all(result["ms"] > 0 for name in ("training", "inference") for result in row[name].values())


def test_small_models_are_not_compared_with_recorded_times_of_full_ones(tmp_path, capsys):
    record = bench(tmp_path, "model", "--small", "--only", "image")
    assert "anchors_ms" not in record
    assert "S4" not in capsys.readouterr().out
    assert [row["shape"]["batch"] for row in record["rows"]] == [1]


def test_a_failed_compilation_is_recorded(tmp_path, monkeypatch):
    def broken(module):
        class Broken(nn.Module):
            def forward(self, u):
                raise RuntimeError("no compiler here\nand more")

        return Broken()

    monkeypatch.setattr(torch, "compile", broken)
    record = bench(tmp_path, "model", "--compile", "--only", "Image")
    for name, result in record["rows"][0]["training"].items():
        assert result["ms"] > 0
        if name in ("none", "ours"):
            assert result["compile_ms"] is None
            assert result["compile_error"] == "no compiler here"


def test_compiled_times_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module: module)
    record = bench(tmp_path, "model", "--compile", "--only", "Image", "--pass", "inference")
    assert "training" not in record["rows"][0]
    assert all(record["rows"][0]["inference"][name]["compile_ms"] > 0 for name in ("none", "merged"))


def test_length_can_be_plotted(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    record = bench(tmp_path, "length", "--only", "fourier", "dense")
    check_record(record, "length")
    assert [row["shape"]["length"] for row in record["rows"]] == [32, 64, 128]
    assert set(record["rows"][0]["training"]) == {"fourier l0=1", "fourier l0=32", "dense"}
    file = tmp_path / "results" / "record.json"
    record["rows"][1]["training"]["dense"]["ms"] = None
    file.write_text(json.dumps(record))
    capsys.readouterr()
    other = tmp_path / "new" / "figure.png"
    for image, argv in ((file.with_suffix(".png"), []), (other, ["--out", str(other)])):
        assert main(["plot", "length", str(file), *argv]) == 0
        assert image.read_bytes().startswith(b"\x89PNG")
        assert capsys.readouterr().out == f"{image}\n"


def test_plotting_needs_matplotlib(tmp_path, capsys, monkeypatch):
    file = tmp_path / "record.json"
    file.write_text(json.dumps({"benchmark": "length", "rows": [{}]}))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "mrconv.bench.charts", raising=False)
    with pytest.raises(SystemExit) as stop:
        main(["plot", "length", str(file)])
    assert stop.value.code == 2
    assert "a plot needs matplotlib: install mrconv with its extra 'plot'" in capsys.readouterr().err


@pytest.mark.parametrize("kernel", ["dilated", "fourier"])
def test_separate_branches_compute_the_same_output_as_the_layer(kernel):
    shape = shapes.Shape("", 2, 64, 4, kernel, 8)
    separate = candidates.branches(shape, "cpu")
    ours = candidates.layer(shape, "torch", "cpu")
    layer = separate.layer if isinstance(separate, candidates.DilatedBranches) else separate
    ours.load_state_dict(layer.state_dict())
    u = torch.randn(2, 64, 4)
    assert relative(separate(u), ours(u)) < 1e-5


def test_a_candidate_too_large_for_memory_records_an_error(monkeypatch):
    monkeypatch.setattr(candidates, "available_memory", lambda: 2.0**10)
    u = torch.randn(2, 64, 4)
    steps = candidates.steps("training", {"branches": candidates.branches(LAYERS[0], "cpu")}, u, u)
    result = timing.measure(steps, Options(rounds=1))["branches"]
    assert result == {"ms": None, "graph_ms": None, "MiB": None, "error": "needs about 0 GiB"}


def test_cuda_graphs_are_timed_and_a_failed_capture_is_recorded(monkeypatch):
    def capture(step, pool, stream):
        assert (pool, stream) == ("shared pool", "shared stream")
        if step is bad:
            raise RuntimeError("not permitted when stream is capturing\nand more")
        return step

    def bad():
        return None

    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: "shared pool")
    monkeypatch.setattr("torch.cuda.Stream", lambda: "shared stream")
    monkeypatch.setattr(timing, "captured", capture)
    monkeypatch.setattr(timing, "synchronise", lambda device: None)
    monkeypatch.setattr(timing, "first_steps", lambda step, device: 1.0)
    results = timing.measure({"good": lambda: None, "bad": bad}, Options("cuda", rounds=3))
    assert results["good"]["graph_ms"] > 0
    assert results["bad"]["ms"] > 0
    assert results["bad"]["graph_ms"] is None
    assert results["bad"]["graph_error"] == "not permitted when stream is capturing"


@pytest.mark.parametrize(
    "names", [["eager"], ["graph"], ["compiled"], ["both"], ["eager", "both"], [*TIMINGS.values()]]
)
def test_a_timing_that_is_not_asked_for_is_neither_warmed_up_nor_captured(monkeypatch, names):
    ran, captured = set(), []

    def eager():
        ran.add("eager")

    def compiled():
        ran.add("compiled")

    monkeypatch.setattr("torch.cuda.graph_pool_handle", lambda: None)
    monkeypatch.setattr("torch.cuda.Stream", lambda: None)
    monkeypatch.setattr(timing, "captured", lambda step, pool, stream: captured.append(step) or step)
    monkeypatch.setattr(timing, "synchronise", lambda device: None)
    monkeypatch.setattr(timing, "first_steps", lambda step, device: step() or 1.0)
    options = Options("cuda", rounds=1, timings=names)
    result = timing.measure({"a": eager}, options, {"a": compiled} if options.compile else None)["a"]
    assert [TIMINGS[key] for key in TIMINGS if result.get(key)] == names
    assert (result["MiB"] is None) == (not {"eager", "graph"} & set(names))
    assert ("eager" in ran, "compiled" in ran) == (bool({"eager", "graph"} & set(names)), options.compile)
    assert captured == [step for name, step in (("graph", eager), ("both", compiled)) if name in names]


def test_peak_memory_counts_tensors_that_are_alive_together():
    def step():
        a = torch.empty(2**20)
        b = a + 1
        del a
        return b.sum()

    assert timing.first_steps(step, "cpu") == pytest.approx(8, rel=0.01)


def test_all_lengths_have_the_same_number_of_elements(monkeypatch):
    monkeypatch.undo()
    for device, small, longest in (("cuda", False, 2**20), ("cpu", False, 2**20), ("cpu", True, 2**16)):
        sizes = shapes.lengths(device, small)
        assert [length for _, length, _ in sizes] == [2**i for i in range(8, longest.bit_length())]
        assert len({batch * length * channels for batch, length, channels in sizes}) == 1


def test_mixers_are_compared_in_the_same_block(tmp_path, capsys):
    record = bench(tmp_path, "compare", "--mixers", "s4", "mamba", "--only", "Image")
    assert set(record["rows"][0]["training"]) == {"ours", "large", "s4", "mamba"}
    assert set(record["rows"][0]["inference"]) == {"ours", "merged", "large", "large merged", "s4", "mamba"}
    assert all(result["ms"] > 0 for each in PASSES for result in record["rows"][0][each].values())
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["ours", "merged", "large", "large", "merged", "s4", "mamba"]
    assert [out.count(line) for line in ("examples/s", "speed / S4's")] == [len(PASSES)] * 2
    batch, results = record["rows"][0]["shape"]["batch"], record["rows"][0]["inference"]
    assert results["merged"]["examples_per_s"] == pytest.approx(1e3 * batch / results["merged"]["ms"])
    assert results["merged"]["beside_s4"] == pytest.approx(results["s4"]["ms"] / results["merged"]["ms"])


def test_timings_can_be_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module: module)
    record = bench(
        tmp_path, "model", "--mixers", "none", "--only", "Image", "--pass", "inference", "--timings", "compiled"
    )
    result = record["rows"][0]["inference"]["none"]
    assert (result["ms"], result["MiB"]) == (None, None)
    assert result["compile_ms"] > 0


@pytest.mark.slow
def test_mixers_are_compared_compiled(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda block: compiled.append(block.layer) or block)
    record = bench(tmp_path, "compare", "--mixers", "s4d", "--only", "1K", "--pass", "inference", "--compile")
    assert {type(layer).__name__ for layer in compiled} == {"MRConv", "S4D"}
    assert all(result["compile_ms"] > 0 for result in record["rows"][0]["inference"].values())


def test_a_mixer_that_does_not_support_a_shape_reports_why():
    shape = shapes.ModelShape("Bidirectional", 2, 64, 4, "fourier", 2, bidirectional=True, depth=1)
    with pytest.raises(RuntimeError, match="multiresconv runs forwards only"):
        mixer_comparison.stack_or_error(shape, "multiresconv", "cpu")(torch.zeros(2, 64, 4))


def test_an_unknown_mixer_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "compare", "--mixers", "s4e", "--device", "cpu"])
    assert "argument --mixers: mixer must be one of" in capsys.readouterr().err


def compared(names):
    """Return a record of `mrconv bench compare` with invented times."""

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
    record = compared(["s4", "mamba", "attention"])
    if part == "shapes":
        record["rows"] = record["rows"][: len(MODELS)]
    elif part == "lengths":
        record["rows"] = record["rows"][len(MODELS) :]
    elif part == "inference":
        for row in record["rows"]:
            del row["training"]
            row["inference"]["attention"] = {"ms": None, "graph_ms": None, "MiB": None, "error": "too large"}
    file = tmp_path / "record.json"
    file.write_text(json.dumps(record))
    assert main(["plot", "compare", str(file)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'record.png'}\n"
    assert (tmp_path / "record.png").read_bytes().startswith(b"\x89PNG")


def test_bars_show_speeds_relative_to_s4():
    from matplotlib.figure import Figure

    graphs = {"ours": {"ms": 4.0, "graph_ms": 1.0}, "s4": {"ms": 2.0, "graph_ms": 3.0}, "mega": {"ms": 5.0}}
    times = charts.best_times(graphs)  # that of mega is eager only
    assert times == pytest.approx({"mrconv": 1.0, "s4": 2.0, "mega": math.nan}, nan_ok=True)
    assert charts.best_times({"s4": {"ms": 2.0}, "mega": {"ms": 5.0}}) == {"s4": 2.0, "mega": 5.0}
    axes = Figure().subplots()
    charts.draw_bars(axes, times)
    assert [bar.get_width() for bar in axes.patches][1:] == [1.0, 2.0]
    assert [text.get_text() for text in axes.texts] == ["–", "1", "2"]


def test_a_comparison_without_s4_cannot_be_plotted(tmp_path, capsys):
    file = tmp_path / "record.json"
    for change in (lambda row: row["training"].pop("s4"), lambda row: (row.pop("training"), row.pop("inference"))):
        record = compared(["s4", "mamba"])
        for row in record["rows"]:
            change(row)
        file.write_text(json.dumps(record))
        with pytest.raises(SystemExit):
            main(["plot", "compare", str(file)])
        assert "has no times of S4 in training or inference" in capsys.readouterr().err


def test_generation_is_measured(tmp_path, capsys, monkeypatch):
    file = tmp_path / "record.json"
    arguments = ["--histories", "32", "48", "--d-model", "8", "--depth", "1", "--out", str(file)]
    monkeypatch.setattr(sys, "argv", ["generation.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "benchmarks" / "generation.py"), run_name="__main__")
    assert stop.value.code == 0
    record = json.loads(file.read_text())
    assert [row["history"] for row in record["rows"]] == [32, 48]
    for row in record["rows"]:
        assert row["attention"]["tokens_per_s"] == pytest.approx(1000 / row["attention"]["ms"])
        assert row["merged, recomputed"]["ms"] > 0


@pytest.mark.parametrize("dtype", slow_except(["float32", "bfloat16"], "bfloat16"))
def test_vision(tmp_path, capsys, monkeypatch, dtype):
    monkeypatch.setattr(shapes, "VISION", [shapes.VisionShape("T", "tiny", reduced=True, batch=1)])
    argv = ["vision", "--dtype", dtype, "--pass", "training", "inference", "--batch", "1"]
    record = bench(tmp_path, *argv)
    (row,) = record["rows"]
    assert row["batch"] == {"training": 1, "inference": 1}
    assert list(row["training"]) == ["ours", "branches", "ConvNeXt"]
    assert list(row["inference"]) == ["merged", "branches", "torch FFT", "ConvNeXt"]
    assert all(result["ms"] > 0 for each in row["batch"] for result in row[each].values())
    out = capsys.readouterr().out
    assert "T, inference, batch 1, images/s" in out
    assert "error" not in out
    assert main(["plot", "vision", str(tmp_path / "results" / "record.json")]) == 0
    assert (tmp_path / "results" / "record.png").stat().st_size > 1000


def test_vision_models_agree_between_backends():
    shape = shapes.VisionShape("T", "tiny", batch=1, reduced=True)
    models = image_models.models(shape, "inference", image_models.Options())
    x = image_models.images(shape, "inference", 1, image_models.Options())
    with torch.no_grad():
        models["merged"].load_state_dict(models["torch FFT"].state_dict())
        assert relative(models["merged"](x), models["torch FFT"](x)) < 1e-5
    copied = image_models.compile_blocks(models["ConvNeXt"])
    compiled = [m for m in copied.modules() if m._compiled_call_impl is not None]
    assert len(compiled) == 4
    assert not any(m._compiled_call_impl for m in models["ConvNeXt"].modules())


def test_vision_without_timm_reports_the_import_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    model = image_models.timm_model("convnext_tiny")
    with pytest.raises(RuntimeError, match="timm cannot be imported: import of timm halted"):
        model(torch.zeros(1))
