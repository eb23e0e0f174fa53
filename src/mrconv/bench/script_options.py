"""Command-line options that the benchmark scripts share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch


def step_parser(description: str, sizes: str, default_sizes: Sequence[int], d_model: int) -> argparse.ArgumentParser:
    """Return the parser of a benchmark of streaming steps.

    Args:
        description: docstring of the script; its first line is printed by --help.
        sizes: name of the option with the sequence lengths to measure.
        default_sizes: its default.
        d_model: default number of channels.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(f"--{sizes}", type=int, nargs="+", default=default_sizes)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--d-model", type=int, default=d_model)
    parser.add_argument("--out", type=Path, help="JSON file of the record")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the parsed command line; exit if it names a device that torch does not have."""
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    return arguments
