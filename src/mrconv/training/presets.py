"""From a command line to an experiment, by Hydra."""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mrconv.mixers import mixer_class
from mrconv.tasks import DataError

from .experiment import Experiment, check_key

CONFIGS, CONFIG = "mrconv.configs", "train"
GROUPS = ["callbacks", "env", "help", "hydra_help", "hydra_logging", "job_logging", "launcher", "output", "sweeper"]
HYDRAS = ("experiment", "sweep", "hydra", *(f"hydra/{name}" for name in GROUPS))
"""Keys besides an experiment's own."""
ConfigStore.instance().store(name="schema", node=Experiment)


def experiment_names() -> list[str]:
    """Return the names of the ready experiments."""
    folder = resources.files(CONFIGS) / "experiment"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse what is not KEY=VALUE, a key that there is not, or an experiment that there is not, with the nearest."""
    for text in overrides:
        key, sign, value = text.partition("=")
        if not sign:
            raise ValueError(f"settings are written KEY=VALUE; got {text!r}")
        key = key.lstrip("+~").split("@")[0]
        if key == "experiment":
            known = experiment_names()
            for name in value.split(","):
                if name not in known:
                    near = difflib.get_close_matches(name, known, 3)
                    hint = f"near it: {', '.join(near)}" if near else "`mrconv train --list` names all"
                    raise ValueError(f"there is no experiment {name!r}; {hint}")
        else:
            check_key(key.split(".")[0], HYDRAS)


def spelled_out(overrides: Sequence[str]) -> list[str]:
    """Return the settings as Hydra takes them: task.rate is rate, other task.KEY and mixer.KEY are options of those."""
    found = []
    for text in overrides:
        if text.startswith("task."):
            name = text.removeprefix("task.")
            text = name if name.startswith("rate=") else f"task_options.{name}"
        elif text.startswith("mixer."):
            text = f"mixer_options.{text.removeprefix('mixer.')}"
        found.append(_quoted(f"++{text}" if text.startswith(("task_options", "mixer_options")) else text))
    return found


def _quoted(text: str) -> str:
    """Return a setting with its value in quotes where Hydra could not read it, as of a path with brackets."""
    try:
        OverridesParser.create().parse_override(text)
    except HydraException:
        key, _, value = text.partition("=")
        return f"{key}={QuotedString(value, Quote.single).with_quotes()}"
    return text


def composed(overrides: Sequence[str]) -> Experiment:
    """Return the experiment that these settings make."""
    check_overrides(overrides)
    with _hydra():
        return _experiment(hydra_compose(CONFIG, spelled_out(overrides)))


def composed_all(overrides: Sequence[str]) -> list[Experiment]:
    """Return the experiments of a sweep; none where another sweeper than Hydra's own is to choose them."""
    check_overrides(overrides)
    with _hydra():
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        config = hydra.compose_config(CONFIG, spelled_out(overrides), RunMode.MULTIRUN).hydra
        if not config.sweeper._target_.endswith(f".{BasicSweeper.__name__}"):
            return []
        swept = [f"{key}={value}" for key, value in (config.sweeper.params or {}).items()]
        parsed = OverridesParser.create(hydra.config_loader).parse_overrides([*swept, *config.overrides.task])
        [jobs] = BasicSweeper.split_arguments(parsed, None)
        return [_experiment(hydra_compose(CONFIG, job)) for job in jobs]


@contextmanager
def _hydra() -> Iterator[None]:
    """Have Hydra read our configs; what it finds wrong is told in one line."""
    try:
        with initialize_config_module(CONFIGS, "train", version_base="1.3"):
            yield
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        key = getattr(cause, "full_key", None)
        raise ValueError((f"{key}: " if key else "") + str(cause).strip().splitlines()[0]) from error


def _experiment(config: Any) -> Experiment:
    """Return the experiment; a ready one with another mixer than its own goes by another name."""
    experiment = Experiment.make(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]
    if experiment.mixer != "conv":  # of ConvNeXt, on pictures
        mixer_class(experiment.mixer)  # or tell that there is none
    if experiment.data:
        experiment.data = os.path.normpath(experiment.data)  # DIR/ is DIR
    known = ready(experiment.name)
    if known and known.get("mixer", "mrconv") != experiment.mixer:
        experiment.name += f"-{experiment.mixer}"
    return experiment


def ready(name: str) -> dict[str, Any]:
    """Return what the file of a ready experiment says; nothing if there is none of that name."""
    file = resources.files(CONFIGS) / "experiment" / f"{name}.yaml"
    return dict(OmegaConf.create(file.read_text(encoding="utf-8"))) if file.is_file() else {}


class JobFailed(Exception):
    """A job of a sweep has failed: its folder, its settings and why."""


FAILURES = (DataError, ValueError, OSError, JobFailed)
"""What the user can put right, told in one line."""


def launch(overrides: Sequence[str], multirun: bool, job: Callable[[Experiment, Path], None]) -> None:
    """Run jobs as Hydra does: one, or a sweep, through whatever launcher and sweeper are asked for."""
    typed, errors = spelled_out(overrides), list[Exception]()
    parsed = OverridesParser.create().parse_overrides(typed)
    alike = {each.get_key_element() for each in parsed if not each.is_sweep_override()}

    def task(config: Any) -> None:
        hydra = HydraConfig.get()
        try:
            job(_experiment(config), Path(hydra.runtime.output_dir))
        except Exception as error:
            if not multirun:
                errors.append(error)  # Hydra would print more than it says
                return
            if not isinstance(error, FAILURES):
                traceback.print_exc()
            own = " ".join(each for each in hydra.overrides.task if each.partition("=")[0] not in alike)
            told = f"{hydra.runtime.output_dir} ({own}): {' '.join(str(error).split())}"
            print(f"failed: {told}", file=sys.stderr, flush=True)
            raise JobFailed(told) from error

    with _hydra():
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        start, mode = (hydra.multirun, "MULTIRUN") if multirun else (hydra.run, "RUN")
        start(CONFIG, task, [*typed, f"hydra.mode={mode}"])
    if errors:
        raise errors[0]
