"""The page docs/your-data.md: its code and commands run in order, and the commands print what the page shows."""

import contextlib
import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from mrconv.cli import main
from mrconv.training.composition import compose
from mrconv.training.datamodule import prepare
from mrconv.training.module import build_model

PAGE = Path(__file__).parent.parent / "docs/your-data.md"
BLOCK = re.compile(r"^```(python)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MRCONV_DATA", raising=False)


def run_command(command):
    """Return what a command of the page prints to standard output."""
    program, *arguments = shlex.split(command)
    if program != "mrconv":
        return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(arguments) in (0, None), command
    return out.getvalue()


def run_python(code, line, namespace):
    """Run a Python block of the page, which starts at a line."""
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile("\n" * line + code, str(PAGE), "exec"), namespace)


def blocks(text):
    """Yield for each block of a page its line, its code if it is Python, and its commands with the output shown."""
    for match in BLOCK.finditer(text):
        parts = [] if match[1] else re.split(r"^\$ ", match[2].replace("\\\n", ""), flags=re.MULTILINE)[1:]
        commands = [tuple(part.split("\n", 1)) for part in parts]
        yield text[: match.start()].count("\n") + 1, match[2] if match[1] else "", commands


def comparable(output):
    """Return the sorted lines of an output without numbers, repeated spaces, and the paths of runs and caches."""
    output = re.sub(r"(in )/\S*/(runs)|(cache/folder-)\w+", r"\1\2\3", output.replace(",", ""))
    return sorted(" ".join(re.sub(r"-?[\d.]+(e-?\d+)?", "", line).split()) for line in output.splitlines() if line)


@pytest.mark.usefixtures("_in_an_empty_folder")
def test_data_of_the_page_fits_its_commands():
    namespace, trained = {"__name__": "page"}, []
    for line, code, commands in blocks(PAGE.read_text()):
        if code and "mrconv.load" not in code:
            run_python(code, line, namespace)
        for command, shown in commands:
            if command.startswith("mrconv train "):
                experiment = compose(shlex.split(command)[2:])
                build_model(experiment, prepare(experiment))
                trained.append(experiment.name)
                assert f"\n{experiment.name}: test " in shown
            elif command.startswith("mrconv data "):
                assert comparable(run_command(command)) == comparable(shown)
    assert trained == ["tones", "reviews", "sensors", "orders", "bars", "images", "balanced", "long", "chords", "walks"]


@pytest.mark.slow
@pytest.mark.usefixtures("_in_an_empty_folder")
def test_commands_print_what_the_page_shows():
    namespace = {"__name__": "page"}
    for line, code, commands in blocks(PAGE.read_text()):
        run_python(code, line, namespace)
        for command, shown in commands:
            assert comparable(run_command(command)) == comparable(shown), command
