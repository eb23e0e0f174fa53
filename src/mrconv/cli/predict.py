"""mrconv predict: the predictions of a trained model for texts, recordings, images or numbers."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrconv._utils.progress_bar import progress_bar

from .parser import CommandError, add_device, add_plugins, command_errors, positive, usable_device

if TYPE_CHECKING:
    from mrconv.inference import Prediction, Predictor
    from mrconv.tasks.input_files import Input

ABOUT = """Print the most likely classes of each input (of a language model: the most likely next symbols; by the target
of the training, also values, or the class of each position). A FILE is whatever `mrconv train task=folder` takes, with
or without labels: a table (.csv, .tsv, .jsonl, .npz), a folder or an archive of recordings, images or texts; or one
recording, image, text or JSON, {"values": [[...], ...]} or {"text": "..."}. - is standard input, which may be such a
JSON object too."""

FIELDS = ("probabilities", "values", "positions")  # of a prediction, by the model's target
MAX_NOTES = 5  # printed, the most frequent first


def add(commands: Any) -> None:
    """Add the parser."""
    about = "classify texts, recordings, images or numbers with a trained model"
    parser = commands.add_parser("predict", help=about, description=ABOUT)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of a run or of a saved model")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="inputs: files, tables, folders, archives")
    parser.add_argument("--text", action="append", default=[], help="a text as input; may be given several times")
    parser.add_argument("--top", type=positive, default=5, metavar="K", help="classes to print; default: 5")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each input, with all classes")
    about = "write a table of inputs, labels where known, predictions and all probabilities, instead of printing them"
    parser.add_argument("--out", type=Path, metavar="CSV", help=about)
    add_device(parser)
    add_plugins(parser)
    parser.set_defaults(run=run, large_tensors=True)


def run(given: argparse.Namespace) -> None:
    """Predict all inputs, then print or write; print nothing if one of them fails."""
    from mrconv import inference

    for text in given.text:
        _check_text(text)
    if not given.text and not given.files:
        raise CommandError("no input: give a FILE or --text")
    if given.out is not None and not given.out.parent.is_dir():
        raise CommandError(f"argument --out: {given.out.parent} is not a folder")
    with command_errors():
        predictor = inference.load(given.folder, usable_device(given.device))
        if given.text and not predictor.preprocessor.vocabulary:
            raise CommandError(f"--text: the model takes {predictor.preprocessor.kind}, not text: give a FILE")
        results = []
        with progress_bar("predicting") as progress:
            for result in predictor.predict_each(_inputs(given, predictor)):
                results.append(result)
                if len(results) % 32 == 0:
                    progress(len(results), None)
    if given.json:
        _print_json(results)
    elif given.out is None:
        _print(results, given.top)
    if given.out is not None:
        with command_errors():
            write_table(given.out, results)
        plural = "" if len(results) == 1 else "s"
        print(f"{len(results):,} prediction{plural} in {given.out}", file=sys.stderr if given.json else sys.stdout)
    _print_summary(results)


def _inputs(given: argparse.Namespace, predictor: Predictor) -> Iterator[Input]:
    """Yield the inputs of the command line."""
    from mrconv.tasks.input_files import Input

    for i, text in enumerate(given.text, 1):
        yield Input(f"--text {i}" if len(given.text) > 1 else "--text", text)
    yield from chain.from_iterable(
        [Input("-", _standard_input())] if str(path) == "-" else predictor.read(path) for path in given.files
    )


def _print_json(results: Sequence[tuple[Input, Prediction]]) -> None:
    for each, prediction in results:
        label = {} if each.label is None else {"target": each.label}
        values: dict[str, Any] = {"label": prediction.label}
        values |= {name: z for name in FIELDS if (z := getattr(prediction, name))} | {"notes": prediction.notes}
        print(json.dumps({"input": _input_text(each), **label, **values}, ensure_ascii=False))


def _print(results: Sequence[tuple[Input, Prediction]], top: int) -> None:
    for each, prediction in results:
        if len(results) > 1:
            text = f": {textwrap.shorten(_input_text(each), 100, placeholder=' ...')}" if _is_text(each) else ""
            print(f"{each.name}{text}")
        if prediction.probabilities:
            print("\n".join(_lines(prediction.probabilities, top)))
        else:
            print("\n".join(f"{name}  {z:.6g}" for name, z in prediction.values.items()) or prediction.label)


def _print_summary(results: Sequence[tuple[Input, Prediction]]) -> None:
    """Print the accuracy, where several labels are known, and the notes on what was changed."""
    known = [each.label == p.label for each, p in results if each.label is not None and p.probabilities]
    if len(known) > 1:
        print(
            f"{sum(known):,} of {len(known):,} known labels predicted, {sum(known) / len(known):.1%}", file=sys.stderr
        )
    inputs: dict[str, list[str]] = defaultdict(list)
    for each, prediction in results:
        for note in prediction.notes:
            inputs[note].append(each.name)
    frequent = sorted(inputs, key=lambda note: -len(inputs[note]))
    for note in frequent[:MAX_NOTES]:
        where = f"{len(names):,} inputs" if len(names := inputs[note]) > 1 else names[0]
        print(f"note: {note}" + (f" ({where})" if len(results) > 1 else ""), file=sys.stderr)
    if len(frequent) > MAX_NOTES:
        print(f"note: {len(frequent) - MAX_NOTES:,} more notes: --json and --out list them", file=sys.stderr)


def write_table(path: Path, results: Sequence[tuple[Input, Prediction]]) -> None:
    """Write predictions as CSV: input, target if a label is known, prediction, probabilities or values, notes."""
    from mrconv._utils.files import atomic_write

    known = any(each.label is not None for each, _ in results)
    names = [*(f"p({name})" for name in results[0][1].probabilities), *results[0][1].values] if results else []
    with atomic_write(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        target = ["target"] if known else []
        table.writerow(["input", *target, "prediction", *names, "notes"])
        for each, prediction in results:
            numbers = [f"{p:.6g}" for p in (*prediction.probabilities.values(), *prediction.values.values())]
            target = [each.label or ""] if known else []
            table.writerow([_input_text(each), *target, prediction.label, *numbers, "; ".join(prediction.notes)])


def _is_text(each: Input) -> bool:
    return each.name.startswith("--text")


def _input_text(each: Input) -> str:
    """Return the text of --text, or the name of another input."""
    return str(each.raw) if _is_text(each) else each.name


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # the shell passed bytes that are not UTF-8
        raise CommandError(f"--text: {text!r:.60} is not UTF-8") from None


def _standard_input() -> bytes | dict[str, Any]:
    content = sys.stdin.buffer.read()
    try:
        value = json.loads(content)
    except ValueError:
        return content
    return value if isinstance(value, dict) else content


def _lines(probabilities: Mapping[str, float], top: int) -> list[str]:
    first = sorted(probabilities.items(), key=lambda item: -item[1])[:top]
    labels = {name: json.dumps(name) if name.isspace() else name for name, _ in first}
    width = max(map(len, labels.values()))
    return [f"{labels[name]:{width}s}  {100 * value:5.1f} %" for name, value in first]
