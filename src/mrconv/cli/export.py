"""mrconv export: a merged model as a file that runs without mrconv."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .parser import CommandError, add_plugins, optional_imports, positive, usable_device

ABOUT = """Write a merged model as a file that runs without mrconv, and compare the outputs of the file and of the
model on random inputs. Nothing is written unless they agree."""
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2", "aoti": ".aoti.pt2"}
DTYPES = ("float32", "float64", "float16", "bfloat16")


def add(commands: Any) -> None:
    """Add the parser."""
    parser = commands.add_parser("export", help="write a model as ONNX, torch.export or AOTInductor", description=ABOUT)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a run folder, or one that save_pretrained wrote")
    parser.add_argument("--format", choices=SUFFIXES, required=True, help="torch: torch.export; aoti: AOTInductor")
    parser.add_argument("--step", action="store_true", help="one position and a state, instead of whole sequences")
    parser.add_argument("--length", type=positive, metavar="N", help="length of the longest input; default: l_max")
    parser.add_argument("--fixed", action="store_true", help="all inputs have this length; default: 1 up to it")
    parser.add_argument("--padded", action="store_true", help="add the lengths of padded sequences as an input")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the parameters; default: that of the model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="that runs the file; default: cpu")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: FOLDER/model or FOLDER/step, and a suffix")
    add_plugins(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Load the model, export it, print the error."""
    from mrconv.export import ExportFailed, export
    from mrconv.hub import MERGED, MODEL, model_folder
    from mrconv.inference import load_model

    usable_device(given.device)
    folder = model_folder(given.folder, MERGED, MODEL)
    out = given.out or given.folder / f"{'step' if given.step else 'model'}{SUFFIXES[given.format]}"
    names = ("step", "length", "fixed", "padded", "dtype", "device")
    try:
        with optional_imports(f"--format {given.format}", "export"):
            exported = export(load_model(folder), out, given.format, **{name: getattr(given, name) for name in names})
    except (ExportFailed, ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    sizes = ", ".join(f"{batch} x {length}" for batch, length in exported.checked)
    print(f"{exported.path}: {exported.path.stat().st_size / 1e6:.2f} MB")
    print(f"largest relative difference from PyTorch: {exported.error:.1e}; checked at batch x length = {sizes}")
