"""mrconv export: a merged model as a file that runs without mrconv."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .parser import CommandError, positive

ABOUT = """Write a run's model, merged, as a file that runs without mrconv, and compare what the file computes with
what the model does, on random inputs. Nothing is written unless they agree."""
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2", "aoti": ".aoti.pt2"}
DTYPES = ("float32", "float64", "float16", "bfloat16")


def add(commands: Any) -> None:
    """Add the parser."""
    parser = commands.add_parser("export", help="write a model as ONNX, torch.export or AOTInductor", description=ABOUT)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a run folder, or one that save_pretrained wrote")
    parser.add_argument("--format", choices=SUFFIXES, required=True, help="torch: torch.export; aoti: AOTInductor")
    parser.add_argument("--step", action="store_true", help="one position and a state, instead of whole sequences")
    parser.add_argument("--length", type=positive, metavar="N", help="of the longest input; default: l_max")
    parser.add_argument("--fixed", action="store_true", help="all inputs are that long; default: 1 up to it")
    parser.add_argument("--padded", action="store_true", help="the lengths of padded sequences are inputs too")
    parser.add_argument("--dtype", choices=DTYPES, help="of the parameters; default: the model's")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="to run on; default: cpu")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: FOLDER/model or FOLDER/step, and a suffix")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Load, export, tell the error."""
    import torch

    from mrconv.export import ExportFailed, export
    from mrconv.hub import MERGED, MODEL, model_folder, saved_model

    if given.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("argument --device: torch finds no CUDA device here; use --device cpu")
    saved = model_folder(given.folder, MERGED, MODEL)
    out = given.out or given.folder / f"{'step' if given.step else 'model'}{SUFFIXES[given.format]}"
    names = ("step", "length", "fixed", "padded", "dtype", "device")
    try:
        found = export(saved_model(saved), out, given.format, **{name: getattr(given, name) for name in names})
    except ImportError as error:
        raise CommandError(f"--format {given.format} needs {error.name}: pip install 'mrconv[export]'") from None
    except (ExportFailed, ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    sizes = ", ".join(f"{batch} x {length}" for batch, length in found.checked)
    print(f"{found.path}: {found.path.stat().st_size / 1e6:.2f} MB")
    print(f"largest difference from PyTorch, relative: {found.error:.1e}; looked at batch x length = {sizes}")
