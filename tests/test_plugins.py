"""Plug-ins: modules that register kernels, mixers and tasks are imported if the user says so, and never by a record."""

import importlib
import json
import re
import sys
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import yaml

import mrconv
from mrconv._utils import plugins
from mrconv._utils.plugins import NotRegistered, load_plugins
from mrconv.cli import main
from mrconv.kernels.protocol import KERNELS
from mrconv.mixers import MIXERS
from mrconv.tasks.base import TASKS
from mrconv.training.composition import compose

PAGE = Path(__file__).parent.parent / "docs" / "plugins.md"
MODULE = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
MODULES = ("my_plugins", "harmful", "installed_plugins", "broken_plugins", "needs_more")
SETTINGS = ["task=tones", "task.count=50", "d_model=4", "depth=1", "batch_size=10", "epochs=1", "accelerator=cpu"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the module of docs/plugins.md and a run of its kernel and of its mixer."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "my_plugins.py").write_text(MODULE)
    with isolated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("mrconv.training.loop.draw_run", lambda folder, result: None)
        patch.chdir(folder)
        for choice in ("kernel=exponential", "mixer=short-conv"):
            name = choice.partition("=")[0]
            assert main(["train", "plugins=my_plugins", *SETTINGS, choice, f"name={name}"]) == 0
    return folder / "runs"


@pytest.fixture(autouse=True)
def _isolated():
    with isolated():
        yield


@contextmanager
def isolated():
    """Undo registrations, imports of test modules and changes of the import path at the end."""
    with pytest.MonkeyPatch.context() as patch:
        for registry in (KERNELS, MIXERS, TASKS):
            patch.setattr(registry, "entries", dict(registry.entries))
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(plugins, "_loaded", True)  # no entry points of this machine
        yield
    for name in MODULES:
        sys.modules.pop(name, None)


def error_of(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["kernel", "mixer"])
def test_a_run_records_its_plugins(runs, name):
    run = runs / f"{name}-seed0"
    assert yaml.safe_load((run / "config.yaml").read_text())["plugins"] == ["my_plugins"]
    assert json.loads((run / "result.json").read_text())["config"]["plugins"] == ["my_plugins"]
    for saved in ("model", "merged"):
        assert json.loads((run / saved / "config.json").read_text())["plugins"] == ["my_plugins"]
        assert "import my_plugins" in (run / saved / "README.md").read_text()


@pytest.mark.parametrize("name", ["kernel", "mixer"])
def test_commands_work_with_the_plugin_and_are_rejected_without(runs, monkeypatch, capsys, name):
    run, values = runs / f"{name}-seed0", runs / "values.json"
    values.write_text(json.dumps({"values": [[0.0]] * 64}))
    monkeypatch.chdir(runs.parent)
    custom = {"kernel": "kernel 'exponential'", "mixer": "mixer 'short-conv'"}[name]
    allow = "If you trust this code, allow it with --plugins my_plugins (in Python: import my_plugins)"
    commands = {
        ("evaluate", run, "--device", "cpu"): (run, "task 'tones'"),
        ("predict", run, values): (run / "merged", custom),
        ("info", run): (run / "model", custom),
        ("serve", run, "--device", "cpu"): (run / "merged", custom),
    }
    for words, (record, need) in commands.items():
        message = f"{record} needs {need}, which is not registered; its record names the plug-in my_plugins. {allow}"
        assert f"mrconv {words[0]}: error: {message}" in error_of(capsys, *words)
    assert "my_plugins" not in sys.modules
    for words in list(commands)[:3]:
        assert main([*map(str, words), "--plugins", "my_plugins"]) == 0
    assert main(["evaluate", str(run), "plugins=my_plugins"]) == 0


def test_the_same_command_resumes_the_run(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs.parent)
    assert main(["train", "plugins=[my_plugins]", *SETTINGS, "kernel=exponential", "name=kernel"]) == 0
    assert "is complete" in capsys.readouterr().out


def test_a_sweep_imports_plugins_too(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs.parent)
    assert main(["train", "-m", "--show", "plugins=my_plugins,json", *SETTINGS, "mixer=s4d,short-conv"]) == 0
    experiments = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [each["plugins"] for each in experiments] == [["my_plugins", "json"]] * 2
    assert not any("plugins" in each["name"] for each in experiments)


def test_data_commands_take_plugins(runs, monkeypatch, capsys):
    monkeypatch.chdir(runs.parent)
    assert main(["data", "show", "tones", "count=50", "--plugins", "my_plugins"]) == 0
    assert "low" in capsys.readouterr().out


def test_python_imports_the_module_itself(runs, monkeypatch):
    with pytest.raises(NotRegistered, match="import my_plugins"):
        mrconv.load(runs / "kernel-seed0")
    monkeypatch.syspath_prepend(runs.parent)
    importlib.import_module("my_plugins")
    assert mrconv.load(runs / "kernel-seed0").classes == ("low", "high")


def test_no_record_imports_a_module(tmp_path, monkeypatch, capsys):
    """A folder that names a module of its own as its plug-in."""
    model = mrconv.SequenceClassifier(n_classes=2, d_input=1, d_model=4, depth=1, l_max=16)
    model.save_pretrained(tmp_path)
    (tmp_path / "harmful.py").write_text("raise SystemExit('imported')")
    config = tmp_path / "config.json"
    saved = json.loads(config.read_text())
    monkeypatch.chdir(tmp_path)
    for changes in ({"kernel": "harmful"}, {"mixer": "harmful:Mixer"}, {}):
        for named in (["harmful"], "harmful", ["harmful", 1, "a b"], {"harmful": 1}):
            config.write_text(json.dumps(saved | changes | {"plugins": named}))
            if not changes:
                assert main(["info", str(tmp_path)]) == 0
                continue
            message = "its record names the plug-in harmful. If" if isinstance(named, list) else "must be one of"
            assert message in error_of(capsys, "info", tmp_path)
    assert "harmful" not in sys.modules


def test_entry_points_are_imported_when_a_name_is_not_registered(tmp_path, monkeypatch):
    (tmp_path / "installed_plugins.py").write_text(MODULE)
    (tmp_path / "broken_plugins.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("broken_plugins", "installed_plugins")
    points = [EntryPoint(name, name, plugins.GROUP) for name in names]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points if group == plugins.GROUP else [])
    monkeypatch.setattr(plugins, "_loaded", False)
    mrconv.MRConv(4, 16, kernel="fourier")
    assert "installed_plugins" not in sys.modules
    with pytest.warns(UserWarning, match="the plug-in broken_plugins of an installed package fails: ZeroDivisionError"):
        layer = mrconv.MRConv(4, 16, kernel="exponential")
    assert layer.branches[0].kernel.__class__.__module__ == "installed_plugins"
    with pytest.raises(NotRegistered, match=r"one of .*exponential.*; got 'exponentia'; did you mean"):
        mrconv.MRConv(4, 16, kernel="exponentia")


def test_a_run_records_the_plugins_of_entry_points(monkeypatch, tmp_path):
    (tmp_path / "my_plugins.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint("mine", "my_plugins", plugins.GROUP)]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    monkeypatch.setattr(plugins, "_loaded", False)
    assert compose([*SETTINGS, "mixer=short-conv"]).plugins == ["my_plugins"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module", "no_such_module cannot be imported: no_such_module is neither installed nor in "),
        ("json.no_such", "json.no_such cannot be imported: json.no_such is neither installed nor in "),
        ("needs_more", "the plug-in needs_more needs no_such_package, which is not installed"),
        ("my-module", "got 'my-module'"),
        ("../my", "got '../my'"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_named(tmp_path, monkeypatch, name, message):
    (tmp_path / "needs_more.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_plugins([name])


def test_invalid_names_of_plugins_are_reported(capsys):
    error = error_of(capsys, "train", "plugins=my-module", "experiment=demo")
    assert "plugins must be names of modules such as my_package.kernels; got ['my-module']" in error
