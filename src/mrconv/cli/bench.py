"""mrconv bench: times and memory on this machine."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrconv.bench import shapes
from mrconv.bench.options import PASSES, TIMINGS, Options

from .parser import CommandError, Parser, positive, usable_device

SMALL_STACK = "an eighth of the batch, at most two blocks"


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: its module in mrconv.bench, help, entries that `--only` selects, and effect of `--small`."""

    module: str
    about: str
    entries: Sequence[Any]
    small: str
    passes: Sequence[str] = PASSES
    default_passes: Sequence[str] = PASSES
    compile_help: str | None = None


BENCHMARKS = {
    "layer": Benchmark(
        "single_layer",
        "one layer, against the paper's N branches and one dense FFT convolution",
        shapes.LAYERS,
        "an eighth of the batch",
    ),
    "model": Benchmark(
        "block_stacks",
        "stacks of blocks that differ only in their mixer",
        shapes.MODELS,
        SMALL_STACK,
        compile_help="also measure under torch.compile, block by block; not the N branches",
    ),
    "compare": Benchmark(
        "mixer_comparison",
        "all mixers in the same block, at the paper's shapes and against length",
        [*shapes.MODELS, *shapes.LENGTHS],
        SMALL_STACK,
        compile_help="also measure under torch.compile, block by block",
    ),
    "length": Benchmark(
        "length_sweep",
        "one layer against length, at a constant number of elements",
        shapes.KINDS,
        "2**16 positions of 8 channels, lengths up to 65,536",
    ),
    "vision": Benchmark(
        "image_models",
        "images/s of MRConvNeXt, against ConvNeXt and Swin of the same size (from timm, if installed)",
        shapes.VISION,
        "one block per stage, 2 images of 64 x 64",
        passes=("training", "inference"),
        default_passes=("inference",),
        compile_help="also measure under torch.compile, block by block",
    ),
}


def add(commands: Any) -> None:
    """Add the parser."""
    about = "measure times and peak memory on this machine"
    parser = commands.add_parser("bench", help=about, description=about.capitalize() + ".")
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for name, benchmark in BENCHMARKS.items():
        about = benchmark.about
        _add(benchmarks.add_parser(name, help=about, description=about[0].upper() + about[1:] + "."), name, benchmark)


def _add(parser: Parser, name: str, benchmark: Benchmark) -> None:
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda if available, else cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="default: float32")
    parser.add_argument("--rounds", type=positive, default=20, metavar="N", help="times are medians of N; default: 20")
    parser.add_argument("--small", action="store_true", help=f"{benchmark.small}: for CPUs")
    names = ", ".join(entry.name for entry in benchmark.entries)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"only entries with such a prefix: {names}")
    default = "all" if benchmark.default_passes == benchmark.passes else ", ".join(benchmark.default_passes)
    parser.add_argument(
        "--pass",
        nargs="+",
        choices=benchmark.passes,
        default=benchmark.default_passes,
        dest="passes",
        help=f"default: {default}",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="record the results in this file")
    timings = parser.add_mutually_exclusive_group()
    allowed = Options.timings
    if benchmark.compile_help is not None:
        allowed = tuple(TIMINGS.values())
        timings.add_argument(
            "--compile", action="store_const", const=allowed, dest="timings", help=benchmark.compile_help
        )
    about = f"default: {', '.join(Options.timings)}"
    timings.add_argument("--timings", nargs="+", choices=allowed, help=about)
    if name == "vision":
        about = "images per batch, halved until all candidates fit; default: 256"
        parser.add_argument("--batch", type=positive, metavar="N", default=0, help=about)
    if name == "model":
        about = f"some of {', '.join(shapes.STACKS)}; default: all"
        parser.add_argument("--mixers", nargs="+", choices=shapes.STACKS, metavar="NAME", help=about)
    if name == "compare":
        parser.add_argument("--mixers", nargs="+", metavar="NAME", help="default: all of mrconv.baselines")
    parser.set_defaults(run=run, benchmark=benchmark, timings=Options.timings, mixers=None, batch=0)


def run(arguments: argparse.Namespace) -> None:
    """Check the arguments, then measure."""
    benchmark: Benchmark = arguments.benchmark
    try:
        shapes.select(benchmark.entries, arguments.only)
    except ValueError as error:
        raise CommandError(f"argument --only: {error}") from None
    if arguments.out is not None:
        _check_writable(arguments.out)

    fields = ("dtype", "rounds", "small", "only", "out", "command", "passes", "timings", "mixers", "batch")
    options = Options(device=usable_device(arguments.device), **{name: getattr(arguments, name) for name in fields})
    if options.device == "cpu" and not {"eager", "compiled"} & set(options.timings):
        raise CommandError("argument --timings: CUDA graphs need a GPU; add eager or compiled")
    try:
        importlib.import_module(f"mrconv.bench.{benchmark.module}").run(options)
    except ValueError as error:
        if arguments.mixers is None:
            raise
        raise CommandError(f"argument --mixers: {error}") from None
    if arguments.out is not None:
        print(f"recorded in {arguments.out}")


def _check_writable(path: Path) -> None:
    """Raise an error before the measurements if the results cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise CommandError(f"argument --out: cannot write {path}: {error.strerror}") from None
