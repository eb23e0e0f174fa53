"""mrconv info: the parameters and operations of a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .parser import CommandError


def add(commands: Any) -> None:
    """Add the parser."""
    about = "print the parameters and operations of a model, trained and merged, by part"
    parser = commands.add_parser("info", help=about, description=about.capitalize() + ".")
    what = "a model's name such as mrconvnext_tiny_fourier, a run folder, or a folder that save_pretrained wrote"
    parser.add_argument("model", metavar="NAME_OR_FOLDER", help=what)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Print the table of parts."""
    from mrconv.summary import format_table, summarize

    model = load(given.model)
    print(f"{given.model}: {type(model).__name__}\n")
    print(format_table(summarize(model)))
    print("\nG: 10^9 multiply-adds for one input, merged; in mixing, two operations of an FFT count as one")


def load(name: str) -> Any:
    """Return the model of a name or a folder."""
    from mrconv.hub import MODEL, model_folder
    from mrconv.inference import load_model
    from mrconv.vision.convnext import MRConvNeXt, variants

    if name in variants():
        return MRConvNeXt.named(name, device="meta")
    try:
        return load_model(model_folder(Path(name), MODEL))
    except FileNotFoundError:
        raise CommandError(
            f"{name} is neither a folder that holds a model nor a model's name; the names are {', '.join(variants())}"
        ) from None
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from None
