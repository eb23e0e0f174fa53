"""The page docs/your-data.md: its code and commands run in order, and the commands print what the page shows."""

import contextlib
import io
import shlex
from pathlib import Path

import pytest

from mrconv.inference import save
from mrconv.tasks.preprocessing import Preprocessor
from mrconv.training.composition import compose
from mrconv.training.datamodule import prepare
from mrconv.training.module import build_model

from .pages import blocks, comparable, run_command

PAGE = Path(__file__).parent.parent / "docs/your-data.md"


@pytest.fixture
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MRCONV_DATA", raising=False)


def run_python(code, line, namespace):
    """Run a Python block of the page, which starts at a line."""
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile("\n" * line + code, str(PAGE), "exec"), namespace)


@pytest.mark.usefixtures("_in_an_empty_folder")
def test_data_of_the_page_fits_its_commands():
    namespace, trained = {"__name__": "page"}, []
    for line, code, commands in blocks(PAGE.read_text()):
        if code and "mrconv.load" not in code:
            run_python(code, line, namespace)
        for command, shown in commands:
            if command.startswith("mrconv train "):
                experiment = compose(shlex.split(command)[2:])
                data = prepare(experiment)
                folder = Path("runs", f"{experiment.name}-seed0", "model")  # that a later init names
                save(build_model(experiment, data), folder, Preprocessor.from_data(data))
                trained.append(experiment.name)
                assert f"\n{experiment.name}: test " in shown
            elif command.startswith("mrconv data "):
                assert comparable(run_command(command)) == comparable(shown)
    folders = [
        "tones",
        "reviews",
        "sensors",
        "orders",
        "bars",
        "images",
        "balanced",
        "long",
        "chords",
        "walks",
        "calls",
    ]
    assert trained == folders


@pytest.mark.slow
@pytest.mark.usefixtures("_in_an_empty_folder")
def test_commands_print_what_the_page_shows():
    namespace = {"__name__": "page"}
    for line, code, commands in blocks(PAGE.read_text()):
        run_python(code, line, namespace)
        for command, shown in commands:
            assert comparable(run_command(command)) == comparable(shown), command
