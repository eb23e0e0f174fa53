"""The `mrconv` command: help, version, and errors in one line with exit code 2."""

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mrconv
from mrconv.cli import COMMANDS, main

ROOT = Path(__file__).parent.parent


def outcome(capsys, *argv):
    """Return exit code, standard output and standard error of a command line."""
    try:
        code = main(argv)
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def test_version(capsys):
    assert outcome(capsys, "--version") == (0, f"mrconv {mrconv.__version__}\n", "")


def test_the_version_is_that_of_the_package():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == mrconv.__version__


def test_the_entry_point_is_main():
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["mrconv"]
    module, function = target.split(":")
    assert getattr(importlib.import_module(module), function) is main


@pytest.mark.parametrize(
    "argv",
    [[], ["bench"], ["plot"], ["bench", "layer"], ["bench", "model"], ["bench", "length"], ["plot", "length"]],
    ids=" ".join,
)
def test_help(capsys, argv):
    code, out, err = outcome(capsys, *argv, "--help")
    assert code == 0
    assert out.startswith(" ".join(["usage: mrconv", *argv]))
    assert not err


def test_help_lists_every_command(capsys):
    out = outcome(capsys, "--help")[1]
    for command in COMMANDS:
        assert f"    {command.__name__.rsplit('.', 1)[1]} " in out


@pytest.mark.parametrize("argv", [["train", "--list"], ["data", "list"]], ids=" ".join)
def test_a_closed_pipe_is_not_an_error(argv):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "mrconv", *argv]
    process = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (process.returncode, process.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: COMMAND"),
        (["bnch"], "'bnch'"),
        (["bench"], "required: BENCHMARK"),
        (["bench", "layer", "--round", "3"], "unrecognized arguments: --round"),
        (["bench", "layer", "--rounds", "0"], "argument --rounds: must be a positive integer; got '0'"),
        (["bench", "layer", "--rounds", "many"], "argument --rounds: must be a positive integer; got 'many'"),
        (["bench", "layer", "--dtype", "float16"], "'float16'"),
        (["bench", "layer", "--device", "tpu"], "'tpu'"),
        (["bench", "layer", "--only", "Txt"], "argument --only: 'Txt' must be the name, or the start of the name"),
        (["bench", "layer", "--compile"], "unrecognized arguments: --compile"),
        (["bench", "layer", "--timings", "both"], "argument --timings: invalid choice: 'both'"),
        (["bench", "layer", "--timings", "graph", "--device", "cpu"], "argument --timings: CUDA graphs need a GPU"),
        (["bench", "model", "--timings", "eager", "--compile"], "--compile: not allowed with argument --timings"),
        (["bench", "model", "--only", "Speech"], "'ListOps', 'Text', 'Image', 'Pathfinder', 'Path-X'"),
        (["bench", "length", "--out", "/dev/null/a.json"], "argument --out: cannot write /dev/null/a.json"),
        (["plot", "length"], "required: FILE.json"),
        (["plot", "length", "/nowhere.json"], "cannot read /nowhere.json: No such file or directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_have_one_line_and_exit_code_2(capsys, argv, message):
    code, out, err = outcome(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("mrconv")
    assert message in err
    assert err.count("\n") == 1


def test_a_missing_gpu_is_reported(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = outcome(capsys, "bench", "layer", "--device", "cuda")
    assert code == 2
    assert "argument --device: cannot use 'cuda': torch finds no CUDA device; use --device cpu" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "was not recorded by `mrconv bench length`"),
        (json.dumps({"benchmark": "layer", "rows": []}), "was not recorded by `mrconv bench length`"),
        (json.dumps({"benchmark": "length", "rows": []}), "has no measurements"),
    ],
)
def test_a_file_that_cannot_be_plotted_is_reported(capsys, tmp_path, text, message):
    file = tmp_path / "recorded.json"
    file.write_text(text)
    code, _, err = outcome(capsys, "plot", "length", str(file))
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_python_m_mrconv_runs_the_command():
    process = subprocess.run([sys.executable, "-m", "mrconv", "--version"], capture_output=True, text=True, check=True)
    assert process.stdout == f"mrconv {mrconv.__version__}\n"


def test_the_command_line_imports_no_torch():
    code = f"""
import sys, types
package = types.ModuleType("mrconv")
package.__path__, package.__version__ = [{str(Path(mrconv.__file__).parent)!r}], "0"
sys.modules["mrconv"] = package
from mrconv.cli import main
try:
    main(["bench", "layer", "--only", "unknown"])
except SystemExit as stop:
    assert stop.code == 2
assert not {{"torch", "matplotlib", "numpy"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("command", "module"), [("evaluate", "evaluation"), ("reparameterize", "evaluation"), ("finish", "loop")]
)
def test_a_command_without_the_train_extra_names_it(capsys, monkeypatch, command, module):
    monkeypatch.setitem(sys.modules, f"mrconv.training.{module}", None)
    monkeypatch.delattr(f"mrconv.training.{module}", raising=False)
    with pytest.raises(SystemExit) as stop:
        main([command, "runs/none"])
    assert stop.value.code == 2
    assert f"`mrconv {command}` needs mrconv.training.{module}: install mrconv with its extra 'train'" in (
        capsys.readouterr().err
    )


def test_every_dependency_has_a_lower_and_an_upper_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = [each for name, listed in extras.items() if name not in ("test", "docs", "dev") for each in listed]
    without = [
        each
        for each in (*project["dependencies"], *used)
        if not each.startswith("mrconv[") and not (">=" in each and "<" in each)
    ]
    assert not without
