"""mrconv train: one command for a trained, evaluated, merged model and the record of how it was made."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .data import told
from .parser import CommandError, Parser

ABOUT = """Train a model, evaluate it, merge it and record how it was made, in OUT/NAME-seedSEED (of a sweep, in
OUT/NAME/0, 1, ...). Started again, a run goes on from its last checkpoint."""
MORE = """
examples:
  mrconv train experiment=listops-base
  mrconv train experiment=image-base seed=1 precision=bfloat16
  mrconv train -m experiment=listops-base seed=1,2,3
  mrconv train task=folder data=recordings/ depth=4 d_model=64 epochs=20

`mrconv train --list` names the ready experiments; every key and what it means: mrconv.training.Experiment.
"""


def add(commands: Any) -> None:
    """Add the parser."""
    parser: Parser = commands.add_parser(
        "train",
        help="train a model on a task",
        description=ABOUT,
        epilog=MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="experiment=NAME first, then what differs from it"
    )
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="a sweep: KEY=VALUE,VALUE,... runs all combinations"
    )
    parser.add_argument("--list", action="store_true", help="print the ready experiments and leave")
    parser.add_argument("--show", action="store_true", help="print the experiment as it would run and leave")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Check the settings, then train."""
    try:
        from mrconv.training import compose
    except ImportError as error:
        raise CommandError(f"training needs {error.name}: pip install 'mrconv[train]'") from None
    if given.list:
        print("\n".join(compose.experiment_names()))
        return
    with told():
        compose.check_overrides(given.settings)
        if not given.multirun:
            experiment = compose.composed(given.settings)
            if given.show:
                _print(experiment)
                return
        errors: list[Exception] = []
        compose.launch([*(["-m"] if given.multirun else []), *given.settings], lambda e, f: _job(e, f, errors))
    if errors:
        raise CommandError(str(errors[0])) from errors[0]


def _print(experiment: Any) -> None:
    import dataclasses

    import yaml

    print(yaml.safe_dump(dataclasses.asdict(experiment), sort_keys=False), end="")


def _job(experiment: Any, folder: Path, errors: list[Exception]) -> None:
    """Train one; what the user can put right is kept, so that Hydra shows no traceback of it."""
    from mrconv.tasks import DataError
    from mrconv.training.module import NotFinite
    from mrconv.training.progress import preparing
    from mrconv.training.run import train

    try:
        with preparing(experiment.task) as count:
            result = train(experiment, folder, count)
    except (DataError, ValueError, NotFinite, OSError) as error:
        errors.append(error)
        return
    if result:
        tell(result, folder)


def tell(result: dict[str, Any], folder: Path) -> None:
    """Print a run's result."""
    from mrconv.training import paper
    from mrconv.training.metrics import SCORES

    metric = SCORES[result.get("metric", "accuracy")]
    split = "test" if "test" in result[metric.name] else "val"
    score, merged = (metric.text(result[key][split]) for key in (metric.name, f"merged_{metric.name}"))
    done = f" of {result['epochs_done']} done, of {result['epochs']}" if result["partial"] else ""
    print(f"\n{result['name']}: {split} {score}, merged {merged}, best epoch {result['best_epoch']}{done}")
    known = paper.published(result["name"])
    if known is not None and known.accuracy is not None:
        print(f"the paper: {known.accuracy:.2f} %; best peer: {known.peer}, {known.peer_accuracy:.2f} %")
    print(f"in {folder}: result.json, metrics.csv, model/, merged/, figures/")
