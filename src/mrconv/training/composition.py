"""Composition of experiments from command lines, and their launch, with Hydra."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mrconv._utils.plugins import load_plugins
from mrconv.tasks import DataError, task_class, task_names

from .experiment import Experiment, check_key
from .plugin_records import add_used_plugins
from .presets import CONFIGS, get_preset, presets, variants
from .run_names import run_name

CONFIG = "train"
GROUPS = ["callbacks", "env", "help", "hydra_help", "hydra_logging", "job_logging", "launcher", "output", "sweeper"]
OTHER_KEYS = ("experiment", "variant", "sweep", "hydra", *(f"hydra/{name}" for name in GROUPS))
"""Keys of the command line besides those of `Experiment`."""
DICTIONARIES = ("task_options", "mixer_options", "mixer_lr")
"""Keys with values by name, to which the command line adds names."""


def _register() -> None:
    """Register the schema, every variant as a config that extends its experiment, and the resolver of run names."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Experiment)
    for preset in presets():
        if preset.variant:
            changes = variants(preset.experiment)[preset.variant]
            node = {"defaults": [preset.experiment, "_self_"], "name": preset.name, **changes}
            store.store(group="experiment", name=preset.name, node=OmegaConf.create(node), package="_global_")
    OmegaConf.register_new_resolver("run_name", _resolve_run_name, replace=True)


def _resolve_run_name(*naming_keys: str, _root_: DictConfig) -> str:
    keys = [key for key in _root_ if key != "hydra"]
    return run_name(OmegaConf.to_container(OmegaConf.masked_copy(_root_, keys), resolve=True), naming_keys)  # type: ignore[arg-type]


_register()


def check_settings(settings: Sequence[str]) -> None:
    """Reject settings that are not KEY=VALUE and unknown keys; suggest task.KEY or the closest key."""
    for text in settings:
        key, sign, _ = text.partition("=")
        if not sign:
            raise ValueError(f"settings are written KEY=VALUE; got {text!r}")
        try:
            check_key(key.lstrip("+~").split("@")[0].split(".")[0], OTHER_KEYS)
        except ValueError:
            if with_option := [name for name in task_names() if key in _task_options(name)]:
                which = ", ".join(with_option)
                raise ValueError(f"{key} is an option of a task ({which}): write task.{text}") from None
            raise


def _task_options(task: str) -> list[str]:
    return [field.name for field in dataclasses.fields(task_class(task))]


def hydra_overrides(settings: Sequence[str]) -> list[str]:
    """Return the settings in Hydra's grammar.

    task.KEY and mixer.KEY become options of the task and the mixer. task.rate becomes rate, as no task has such an
    option (`register_task`). plugins=A,B becomes a list. experiment= with variant= becomes experiment= with the name of
    the preset. Values that Hydra cannot parse are quoted.
    """
    overrides = []
    for text in _select_presets(settings):
        if text.startswith("task."):
            key = text.removeprefix("task.")
            text = key if key.startswith("rate=") else f"task_options.{key}"
        elif text.startswith("mixer."):
            text = f"mixer_options.{text.removeprefix('mixer.')}"
        elif text.startswith("plugins="):
            text = f"plugins=[{text.removeprefix('plugins=').strip('[]')}]"
        overrides.append(_quoted("++" * text.startswith(DICTIONARIES) + text))
    return overrides


def _select_presets(settings: Sequence[str]) -> list[str]:
    """Replace experiment=A,B variant=C,D by experiment=A-C,A-D,B-C,B-D, and former names by current ones."""
    chosen: dict[str, list[str]] = {}
    others = []
    for text in settings:
        key, _, value = text.partition("=")
        key = key.lstrip("+")
        if key not in ("experiment", "variant"):
            others.append(text)
        elif key in chosen:
            raise ValueError(f"{key} is set twice; a sweep over several is written -m {key}=A,B")
        else:
            chosen[key] = value.split(",")
    if "experiment" not in chosen:
        if "variant" in chosen:
            raise ValueError("variant needs experiment=NAME; `mrconv train --list` prints the variants of each")
        return others
    names = [
        get_preset(experiment, "" if variant == "null" else variant).name
        for experiment, variant in itertools.product(chosen["experiment"], chosen.get("variant", [""]))
    ]
    return [f"experiment={','.join(names)}", *others]


def _quoted(text: str) -> str:
    """Return a setting, its value in quotes if Hydra cannot parse it, for example a path with brackets."""
    try:
        OverridesParser.create().parse_override(text)
    except HydraException:
        key, _, value = text.partition("=")
        return f"{key}={QuotedString(value, Quote.single).with_quotes()}"
    return text


def compose(settings: Sequence[str]) -> Experiment:
    """Return the experiment that the settings define."""
    check_settings(settings)
    with _hydra():
        overrides = hydra_overrides(settings)
        return _experiment(hydra.compose(CONFIG, overrides), _naming_keys(_parse(overrides)))


def compose_sweep(settings: Sequence[str]) -> list[Experiment]:
    """Return the experiments of a sweep; none if a sweeper other than Hydra's default chooses them while it runs."""
    check_settings(settings)
    with _hydra():
        sweeper, overrides = _sweep(hydra_overrides(settings))
        if not sweeper._target_.endswith(".BasicSweeper"):
            return []
        keys = _naming_keys(overrides)
        jobs = itertools.product(*map(_alternatives, overrides))
        experiments = [_experiment(hydra.compose(CONFIG, list(job)), keys) for job in jobs]
    folders = [Path(e.out, f"{e.name}-seed{e.seed}") for e in experiments]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ValueError(f"jobs of the sweep share the folder {folder}: every job must have other values")
    return experiments


def _sweep(overrides: Sequence[str]) -> tuple[DictConfig, list[Override]]:
    """Return the sweeper's config and the overrides, including the parameters that the config sweeps over."""
    fixed = [text for text in overrides if not _parse([text])[0].is_sweep_override()]
    sweeper = hydra.compose(CONFIG, fixed, return_hydra_config=True).hydra.sweeper
    parameters = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
    return sweeper, _parse([*parameters, *overrides])


def _parse(overrides: Sequence[str]) -> list[Override]:
    return OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(list(overrides))


def _alternatives(override: Override) -> list[str]:
    key = override.get_key_element()
    if override.is_discrete_sweep():
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    return [f"{key}={override.get_value_element_as_str()}"]


def _naming_keys(overrides: Sequence[Override]) -> list[str]:
    """Return the keys that a sweep varies, and "name" if it is set, as `run_name` takes them."""
    keys = [each.get_key_element().lstrip("+") for each in overrides if each.is_sweep_override()]
    if any(each.get_key_element().lstrip("+") == "name" for each in overrides):
        if "experiment" in keys:
            raise ValueError("name cannot be set in a sweep over experiments or variants, which are named after them")
        keys.append("name")
    return [key.replace("_options.", ".") for key in keys]


@contextmanager
def _hydra() -> Iterator[None]:
    """Initialise Hydra with our configs; report its errors in one line."""
    try:
        with hydra.initialize_config_module(CONFIGS, "train", version_base="1.3"):
            yield
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        if missing := _PLUGIN.search(str(error)):
            raise ValueError(_describe_missing_plugin(*missing.groups())) from error
        key = getattr(cause, "full_key", None)
        raise ValueError((f"{key}: " if key else "") + str(cause).strip().splitlines()[0]) from error


PACKAGES = {
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
    "ray": "hydra-ray-launcher",
    "ray_aws": "hydra-ray-launcher",
    "rq": "hydra-rq-launcher",
    "optuna": "hydra-optuna-sweeper",
    "ax": "hydra-ax-sweeper",
    "nevergrad": "hydra-nevergrad-sweeper",
}
"""Packages of Hydra's launchers and sweepers."""
_PLUGIN = re.compile(r"Could not find 'hydra/(launcher|sweeper)/(\w+)'")


def _describe_missing_plugin(kind: str, name: str) -> str:
    """Return the error of a launcher or sweeper that is not installed."""
    if name in PACKAGES:
        return f"hydra/{kind}={name} needs {PACKAGES[name]}: pip install {PACKAGES[name]}"
    known = ", ".join(each for each, package in PACKAGES.items() if package.endswith(kind))
    return f"hydra/{kind}={name} is not installed; Hydra's packages have {known}, and basic needs none"


def _experiment(config: DictConfig, naming_keys: Sequence[str]) -> Experiment:
    """Return the experiment of a composed config, named after the settings that differ from its preset.

    Its plug-ins are imported: the config is what the user gave, not a record. Those that an entry point imported are
    added, so that the run records all that it needs.
    """
    experiment = Experiment.make(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]
    load_plugins(experiment.plugins)
    add_used_plugins(experiment)
    for name in ("data", "init"):
        if value := getattr(experiment, name):
            setattr(experiment, name, os.path.normpath(value))
    experiment.name = run_name(vars(experiment), naming_keys)
    return experiment


class JobFailed(Exception):
    """A failed job of a sweep: its folder, its settings and the reason."""


FAILURES = (DataError, ValueError, OSError, JobFailed)
"""Errors that the user can correct, reported in one line."""


def launch(settings: Sequence[str], multirun: bool, job: Callable[[Experiment, Path], None]) -> None:
    """Run one job, or the jobs of a sweep, with Hydra's launcher and sweeper."""
    overrides, errors, keys = hydra_overrides(settings), list[Exception](), list[str]()
    command = sys.argv

    def task(config: DictConfig) -> None:
        sys.argv = command  # which the run records; the processes of other launchers have theirs
        runtime = HydraConfig.get()
        folder = Path(runtime.runtime.output_dir)  # Hydra makes it absolute
        if folder.is_relative_to(Path.cwd()):
            folder = folder.relative_to(Path.cwd())
        try:
            job(_experiment(config, keys), folder)
        except Exception as error:
            if not multirun:
                errors.append(error)  # raised below: Hydra would print a longer report
                return
            if not isinstance(error, FAILURES):
                traceback.print_exc()
            varied = " ".join(text for text in runtime.overrides.task if _key(text) in set(keys) - {"name"})
            report = f"{folder} ({varied}): {' '.join(str(error).split())}"
            print(f"failed: {report}", file=sys.stderr, flush=True)
            raise JobFailed(report) from error

    with _hydra():
        runner: Any = GlobalHydra.instance().hydra  # only `hydra.main` is public, and it reads sys.argv itself
        keys = _naming_keys(_sweep(overrides)[1] if multirun else _parse(overrides))
        folder = f"${{run_name:{','.join(keys)}}}-seed${{seed}}"
        if multirun:
            with _lost_jobs():
                runner.multirun(CONFIG, task, [f"hydra.sweep.subdir={folder}", *overrides, "hydra.mode=MULTIRUN"])
        else:
            runner.run(CONFIG, task, [f"hydra.run.dir=${{out}}/{folder}", *overrides, "hydra.mode=RUN"])
    if errors:
        raise errors[0]


@contextmanager
def _lost_jobs() -> Iterator[None]:
    """Report a job that a signal ended before it could return anything, which submitit and joblib raise as errors."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("submitit", "joblib"):
            raise
        words = [word for word in str(error).split() if word.strip("-")]
        raise JobFailed(" ".join(words)) from error


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+").replace("_options.", ".")
