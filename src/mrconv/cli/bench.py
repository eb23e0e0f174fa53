"""mrconv bench: times and memory on this machine."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from mrconv.bench import shapes
from mrconv.bench.options import PASSES, Options

from .parser import CommandError, Parser, positive

BENCHMARKS: dict[str, tuple[str, list[Any], str]] = {
    "layer": (
        "one layer, against the paper's N branches and one dense FFT convolution",
        shapes.LAYERS,
        "an eighth of the batch",
    ),
    "model": (
        "stacks of blocks that differ in their mixer only",
        shapes.MODELS,
        "an eighth of the batch, at most two blocks",
    ),
    "compare": (
        "all mixers in the same block, at the paper's shapes and against length",
        [*shapes.MODELS, *shapes.LENGTHS],
        "an eighth of the batch, at most two blocks",
    ),
    "length": (
        "one layer against length, at a constant number of elements",
        shapes.KINDS,
        "2**16 positions of 8 channels, lengths up to 65,536",
    ),
    "vision": (
        "images/s of MRConvNeXt, against ConvNeXt and Swin of the same size (timm's, if it is installed)",
        shapes.VISION,
        "a block per stage, 2 pictures of 64 x 64",
    ),
}


MODULES = {
    "layer": "single_layer",
    "model": "block_stacks",
    "compare": "mixer_comparison",
    "length": "length_sweep",
    "vision": "image_models",
}


def add(commands: Any) -> None:
    """Add the parser."""
    about = "measure times and peak memory on this machine"
    parser = commands.add_parser("bench", help=about, description=about.capitalize() + ".")
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for name, (what, entries, small) in BENCHMARKS.items():
        _add(benchmarks.add_parser(name, help=what, description=what[0].upper() + what[1:] + "."), name, entries, small)


def _add(parser: Parser, name: str, entries: list[Any], small: str) -> None:
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda if there is one, else cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="default: float32")
    parser.add_argument("--rounds", type=positive, default=20, metavar="N", help="times are medians of N; default: 20")
    parser.add_argument("--small", action="store_true", help=f"{small}: for CPUs")
    known = ", ".join(entry.name for entry in entries)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"only those whose names begin so: {known}")
    passes = [each for each in PASSES if name != "vision" or each != "forward"]
    default = ["inference"] if name == "vision" else passes
    told = "inference" if name == "vision" else "all"
    parser.add_argument("--pass", nargs="+", choices=passes, default=default, dest="passes", help=f"default: {told}")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="record the results there")
    if name == "model":
        parser.add_argument("--compile", action="store_true", help="measure ours and none under torch.compile too")
    if name in ("vision", "compare"):
        parser.add_argument("--compile", action="store_true", help="measure under torch.compile too, block by block")
    if name == "vision":
        what = "pictures at a time, halved until all contestants have room; default: 256"
        parser.add_argument("--batch", type=positive, metavar="N", default=0, help=what)
    if name == "compare":
        parser.add_argument("--mixers", nargs="+", metavar="NAME", help="default: all of mrconv.baselines")
    parser.set_defaults(run=run, benchmark=name, entries=entries, compile=False, mixers=None, batch=0)


def run(given: argparse.Namespace) -> None:
    """Check what was asked for, then measure."""
    try:
        shapes.select(given.entries, given.only)
    except ValueError as error:
        raise CommandError(f"argument --only: {error}") from None
    if given.out is not None:
        _check_writable(given.out)

    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("argument --device: torch finds no CUDA device here; use --device cpu")
    fields = ("dtype", "rounds", "small", "only", "out", "compile", "command", "passes", "mixers", "batch")
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = Options(device=device, **{name: getattr(given, name) for name in fields})
    try:
        importlib.import_module(f"mrconv.bench.{MODULES[given.benchmark]}").run(options)
    except ValueError as error:
        if given.mixers is None:
            raise
        raise CommandError(f"argument --mixers: {error}") from None
    if given.out is not None:
        print(f"recorded in {given.out}")


def _check_writable(path: Path) -> None:
    """Find out before the measurements whether the results can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise CommandError(f"argument --out: cannot write {path}: {error.strerror}") from None
