"""mrconv generate: text from a trained language model, as it is made."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .data import told
from .parser import CommandError, device, positive


def add(commands: Any) -> None:
    """Add the parser."""
    about = "write text by a trained language model, character by character"
    parser = commands.add_parser("generate", help=about, description=about.capitalize() + ".")
    parser.add_argument("folder", type=Path, metavar="RUN", help="a run folder, or a saved model with its inputs.json")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the text begins with")
    parser.add_argument("--tokens", type=positive, default=500, metavar="N", help="how many to add; default: 500")
    what = "below 1: likelier characters, 0: always the likeliest; default: 1"
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help=what)
    parser.add_argument("--top-k", type=positive, metavar="K", help="draw among the K likeliest only")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw among the fewest that have probability P only")
    parser.add_argument("--stop", default="", metavar="TEXT", help="end after any of these characters")
    parser.add_argument("--seed", type=int, help="for the same text again; default: another text every time")
    parser.add_argument("--branches", action="store_true", help="the model as trained; default: merged")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    """Print the prompt and what follows, then on standard error how fast that was."""
    import torch

    from mrconv import LanguageModel, hub, reparameterize
    from mrconv.tasks.preprocessing import load_preprocessor

    with told():
        folder = hub.model_folder(given.folder, *((hub.MODEL,) if given.branches else (hub.MERGED, hub.MODEL)))
        model = hub.saved_model(folder)
        if not isinstance(model, LanguageModel):
            raise CommandError(f"{folder} holds a {type(model).__name__}; text is written by a LanguageModel")
        if not given.branches:
            reparameterize(model)
        elif model.config.merged:
            raise CommandError(f"argument --branches: the model in {folder} is merged, it has none")
        inputs = load_preprocessor(folder)
        if inputs is None or len(inputs.vocabulary) != model.config.vocab_size:
            raise CommandError(
                f"{folder / 'inputs.json'} does not name the {model.config.vocab_size} symbols of the model"
            )
        vocabulary = inputs.vocabulary
        prompt = numbered("--prompt", given.prompt, vocabulary)
        stop = numbered("--stop", given.stop, vocabulary)
        if not prompt:
            raise CommandError("argument --prompt: must not be empty")
        place = torch.device(device(given.device))
        generator = torch.Generator(place)
        if given.seed is not None and not -(2**63) <= given.seed < 2**63:
            raise CommandError(f"argument --seed: must fit 64 bits; got {given.seed}")
        if given.seed is None:
            generator.seed()
        else:
            generator.manual_seed(given.seed)

        before = iter([given.prompt])

        def show(token: torch.Tensor) -> None:
            symbol = vocabulary[int(token)]
            sys.stdout.write(next(before, "") + (symbol if len(symbol) == 1 else "\N{REPLACEMENT CHARACTER}"))
            sys.stdout.flush()

        started = time.monotonic()
        written = model.to(place).generate(
            torch.tensor([prompt], device=place),
            given.tokens,
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            stop=stop,
            generator=generator,
            callback=show,
        )
    seconds = time.monotonic() - started
    print()
    count = written.shape[1]
    print(f"{count} characters in {seconds:.2f} s, {count / seconds:,.0f} per second", file=sys.stderr)


def numbered(argument: str, text: str, vocabulary: Sequence[str]) -> list[int]:
    """Return the tokens of a text; refuse characters that are none."""
    known = {symbol: i for i, symbol in enumerate(vocabulary) if len(symbol) == 1}
    strange = sorted(set(text) - set(known))
    if strange:
        told = ", ".join(map(repr, strange))
        raise CommandError(f"argument {argument}: not in the text that the model was trained on: {told}")
    return [known[character] for character in text]
