"""mrconv predict: the predictions of a trained model for texts, recordings, images or numbers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .parser import CommandError, add_device, command_errors, positive, usable_device

ABOUT = """Print the most likely classes of each input (of a language model: the most likely next symbols). Files are
recordings, images or texts, whichever the model takes, or JSON, {"values": [[...], ...]} or {"text": "..."}; - is
standard input, which may be such a JSON object too."""


def add(commands: Any) -> None:
    """Add the parser."""
    about = "classify texts, recordings, images or numbers with a trained model"
    parser = commands.add_parser("predict", help=about, description=ABOUT)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of a run or of a saved model")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="inputs; *.json files are JSON")
    parser.add_argument("--text", action="append", default=[], help="a text as input; may be given several times")
    parser.add_argument("--top", type=positive, default=5, metavar="K", help="classes to print; default: 5")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each input, with all classes")
    add_device(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Read all inputs, predict, print; print nothing if one of them fails."""
    from mrconv import inference
    from mrconv.tasks import DataError

    inputs: list[tuple[str, Any]] = [("--text", _valid_text(text)) for text in given.text]
    inputs += [(str(path), _standard_input() if str(path) == "-" else path) for path in given.files]
    if not inputs:
        raise CommandError("no input: give a FILE or --text")
    predictions = []
    with command_errors():
        predictor = inference.load(given.folder, usable_device(given.device))
        for name, raw in inputs:
            try:
                predictions += predictor.predict([raw])
            except DataError as error:
                raise CommandError(f"{name}: {error}") from None
    for (name, _), prediction in zip(inputs, predictions, strict=True):
        if given.json:
            values = {"label": prediction.label, "probabilities": prediction.probabilities, "notes": prediction.notes}
            print(json.dumps({"input": name, **values}, ensure_ascii=False))
            continue
        if len(inputs) > 1:
            print(name)
        print("\n".join(_lines(prediction.probabilities, given.top)))
        for note in prediction.notes:
            print(f"note: {note}", file=sys.stderr)


def _valid_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # the shell passed bytes that are not UTF-8
        raise CommandError(f"--text: {text!r:.60} is not UTF-8") from None
    return text


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
