"""mrconv info: the parameters and operations of a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .parser import CommandError, add_plugins


def add(commands: Any) -> None:
    """Add the parser."""
    about = "print the parameters and operations of a model, trained and merged, by part"
    parser = commands.add_parser("info", help=about, description=about.capitalize() + ".")
    what = (
        "an experiment's name such as listops-base, a model's name such as mrconvnext_tiny_fourier, a run folder, or a "
        "folder that save_pretrained wrote"
    )
    parser.add_argument("model", metavar="NAME_OR_FOLDER", help=what)
    add_plugins(parser)
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
    if not Path(name).exists() and (model := _experiment_model(name)) is not None:
        return model
    try:
        return load_model(model_folder(Path(name), MODEL))
    except FileNotFoundError:
        raise CommandError(
            f"{name} is neither a folder that holds a model, nor an experiment (`mrconv train --list` prints them), "
            f"nor a model's name; the names are {', '.join(variants())}"
        ) from None
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from None


def _experiment_model(name: str) -> Any:
    """Return the untrained model of an experiment, for the published size of its data; None if there is none."""
    try:
        from mrconv.training import Experiment
        from mrconv.training.module import build_model
        from mrconv.training.presets import find_preset
        from mrconv.training.published_data import published_data
    except ImportError:  # without mrconv[train] there are no experiments
        return None
    preset = find_preset(name)
    if preset is None:
        return None
    experiment = Experiment.make(preset.values())
    return build_model(experiment, published_data(experiment))
