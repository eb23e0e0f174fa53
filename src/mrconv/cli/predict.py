"""mrconv predict: what a trained model says of a text, a recording, a picture or numbers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .data import told
from .parser import CommandError, device, positive

ABOUT = """Tell the classes that a trained model finds likeliest (a language model: what comes next). Files are
recordings, pictures or texts, whichever the model takes, or JSON, {"values": [[...], ...]} or {"text": "..."}; - is
standard input, JSON if it is an object of that."""


def add(commands: Any) -> None:
    """Add the parser."""
    about = "classify texts, recordings, pictures or numbers by a trained model"
    parser = commands.add_parser("predict", help=about, description=ABOUT)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of a run, or of a model")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="inputs; those that end in .json are JSON")
    parser.add_argument("--text", action="append", default=[], help="an input as it stands; may be given several times")
    parser.add_argument("--top", type=positive, default=5, metavar="K", help="classes to show; default: 5")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each input, with all classes")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Read all, predict, print; nothing is printed if there is no answer to one of them."""
    try:
        from mrconv.serve import Served
        from mrconv.tasks import DataError
    except ImportError as error:
        raise CommandError(f"`mrconv predict` needs {error.name}: pip install 'mrconv[serve]'") from None
    inputs = [("--text", _encoded(text), "text/plain") for text in given.text]
    for path in given.files:
        with told():
            content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        json_given = _is_object(content) if str(path) == "-" else path.suffix.lower() == ".json"
        inputs.append((str(path), content, "application/json" if json_given else "application/octet-stream"))
    if not inputs:
        raise CommandError("there is nothing to predict: give a FILE or --text")
    answers = []
    with told():
        served = Served(given.folder, device(given.device))
        for name, content, kind in inputs:
            try:
                rows = served.rows(content, kind)
                found = served.named(served.predict([rows])[0])
            except DataError as error:
                raise CommandError(f"{name}: {error}") from None
            answers.append((name, found, [note for row in rows for note in row.notes]))
    for name, found, notes in answers:
        if given.json:
            print(json.dumps({"input": name, **found, "notes": notes}, ensure_ascii=False))
            continue
        if len(inputs) > 1:
            print(name)
        print("\n".join(_lines(found["probabilities"], given.top)))
        for note in notes:
            print(f"note: {note}", file=sys.stderr)


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # of bytes that the shell gave as they are
        raise CommandError(f"--text: {text!r:.60} is not UTF-8") from None


def _is_object(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict)
    except ValueError:
        return False


def _lines(probabilities: Mapping[str, float], top: int) -> list[str]:
    first = sorted(probabilities.items(), key=lambda item: -item[1])[:top]
    shown = {name: json.dumps(name) if name.isspace() else name for name, _ in first}
    width = max(map(len, shown.values()))
    return [f"{shown[name]:{width}s}  {100 * value:5.1f} %" for name, value in first]
