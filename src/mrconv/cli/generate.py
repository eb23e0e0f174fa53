"""mrconv generate: text from a trained language model, printed as it is generated."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .parser import CommandError, add_device, add_plugins, command_errors, positive, usable_device


def add(commands: Any) -> None:
    """Add the parser."""
    about = "generate text with a trained language model"
    parser = commands.add_parser("generate", help=about, description=about.capitalize() + ".")
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder, or a saved model with its inputs.json")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the start of the text")
    parser.add_argument("--tokens", type=positive, default=500, metavar="N", help="to generate; default: 500")
    what = "below 1: more likely characters, 0: always the most likely; default: 1"
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help=what)
    parser.add_argument("--top-k", type=positive, metavar="K", help="draw among the K most likely characters")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="draw among the fewest characters whose probability reaches P"
    )
    parser.add_argument("--stop", default="", metavar="TEXT", help="stop after any of these characters")
    parser.add_argument("--seed", type=int, help="for reproducible text; default: a new seed every time")
    parser.add_argument("--branches", action="store_true", help="use the model as trained; default: merged")
    add_device(parser)
    add_plugins(parser)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Print the prompt and the generated text, then the speed on standard error."""
    if given.seed is not None and not -(2**63) <= given.seed < 2**63:
        raise CommandError(f"argument --seed: must fit into 64 bits; got {given.seed}")
    with command_errors():
        predictor = _load(given)
        prompt = _tokens("--prompt", given.prompt, predictor.preprocessor.vocabulary)
        stop = _tokens("--stop", given.stop, predictor.preprocessor.vocabulary)
        if not prompt:
            raise CommandError("argument --prompt: must not be empty")
        heading = iter([given.prompt])  # printed with the first symbol: invalid options are rejected before it

        def show(symbol: str) -> None:
            sys.stdout.write(next(heading, "") + symbol)
            sys.stdout.flush()

        started = time.monotonic()
        symbols = predictor.generate(
            prompt,
            given.tokens,
            seed=given.seed,
            stop=stop,
            callback=show,
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
        )
    seconds = time.monotonic() - started
    print()
    print(f"{len(symbols)} characters in {seconds:.2f} s, {len(symbols) / seconds:,.0f} per second", file=sys.stderr)


def _load(given: argparse.Namespace) -> Any:
    """Return the predictor of a language model whose symbols are known."""
    from mrconv import inference

    predictor = inference.load(given.folder, usable_device(given.device), merged=not given.branches)
    if not predictor.generates:
        name = type(predictor.model).__name__
        raise CommandError(f"{predictor.folder} holds a {name}; only a LanguageModel generates text")
    if not predictor.described:
        raise CommandError(f"{predictor.folder / 'inputs.json'} is missing: it names the symbols of the model")
    return predictor


def _tokens(argument: str, text: str, vocabulary: Sequence[str]) -> list[int]:
    """Return the token ids of a text; reject characters that the model was not trained on."""
    ids = {symbol: i for i, symbol in enumerate(vocabulary) if len(symbol) == 1}
    if unknown := sorted(set(text) - set(ids)):
        characters = ", ".join(map(repr, unknown))
        raise CommandError(f"argument {argument}: not in the text that the model was trained on: {characters}")
    return [ids[character] for character in text]
