"""mrconv evaluate, finish and reparameterize: score, record and merge a trained model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mrconv._utils.progress_bar import progress_bar

from .parser import CommandError, add_device, add_plugins, command_errors, optional_imports, usable_device


def add(commands: Any) -> None:
    """Add all parsers."""
    about = "compute the metrics of a run's model, at its sampling rate or another"
    more = (
        " Writes metrics.json, predictions.csv and, of classes, figures/confusion.png, into the run; with --branches,"
        " --recalibrate or settings that may change the scores, into a folder of it such as evaluate-rate0.5."
    )
    parser = commands.add_parser("evaluate", help=about, description=about.capitalize() + "." + more)
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="task.rate=0.5, data_dir=..., batch_size=..., ..."
    )
    parser.add_argument(
        "--branches", action="store_true", help="score the model as trained, with its branches; default: merged"
    )
    parser.add_argument(
        "--recalibrate",
        action="store_true",
        help="first average the statistics of every BatchNorm over training examples of this data, at its rate",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the files")
    add_device(parser)
    add_plugins(parser)
    parser.set_defaults(run=evaluate, large_tensors=True)
    about = "end a run before its last epoch: score, merge and record its best weights, marked as partial"
    more = " `mrconv train` can still resume it."
    parser = commands.add_parser("finish", help=about, description=about.capitalize() + "." + more)
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder")
    add_plugins(parser)
    parser.set_defaults(run=finish)
    about = "merge a run's model into one kernel per layer, and compare its logits with the unmerged model's"
    parser = commands.add_parser("reparameterize", help=about, description=about.capitalize() + ".")
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--rate", type=float, help="sampling rate to merge at, relative to that of training")
    parser.add_argument(
        "--recalibrate",
        action="store_true",
        help="first average the statistics of every BatchNorm over training examples of the run, at this rate",
    )
    what = "default: RUN/merged, at a rate RUN/merged-RATE, recalibrated RUN/merged-recalibrated, ..."
    parser.add_argument("--out", type=Path, metavar="DIR", help=what)
    parser.add_argument("--device", help="device of --recalibrate; default: cuda if available, else cpu")
    add_plugins(parser)
    parser.set_defaults(run=reparameterize)


def evaluate(given: argparse.Namespace) -> None:
    """Print the metrics of every evaluated split; write them and all predictions."""
    with optional_imports("`mrconv evaluate`", "train"):
        from mrconv.training import evaluation
        from mrconv.training.run_names import evaluation_name

    with command_errors():
        device = usable_device(given.device)
        with progress_bar(f"evaluating {given.folder}") as progress:
            measured = evaluation.measure_run(
                given.folder, given.settings, not given.branches, given.recalibrate, device, progress
            )
        changes = measured.changes
        out = given.out or (given.folder / evaluation_name(changes) if changes else given.folder)
        run = given.folder.resolve().name
        facts = {"run": run, "settings": given.settings, "changes": changes, "merged": measured.merged}
        paths = measured.write(out, facts)
    print(f"{measured.text()}\n\nin {out}: {', '.join(str(path.relative_to(out)) for path in paths)}")


def finish(given: argparse.Namespace) -> None:
    """Score, merge and record a run's best weights."""
    from .train import print_result

    with optional_imports("`mrconv finish`", "train"):
        from mrconv.training import loop

    with command_errors():
        print_result(loop.finish(given.folder), given.folder)


def reparameterize(given: argparse.Namespace) -> None:
    """Merge a run's model, compare it with the unmerged one and save it."""
    if given.rate is not None and given.rate <= 0:
        raise CommandError(f"argument --rate: must be positive; got {given.rate}")
    with optional_imports("`mrconv reparameterize`", "train"):
        from mrconv.training import evaluation

    with command_errors(), progress_bar(f"merging {given.folder}") as progress:
        device = usable_device(given.device)
        out, error, sizes = evaluation.merge(given.folder, given.rate, given.out, given.recalibrate, device, progress)
    print(f"{sizes[0]:,} parameters -> {sizes[1]:,}; largest difference of the logits, relative: {error:.1e}")
    print(out)
