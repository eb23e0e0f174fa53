"""From a command line to an experiment, by Hydra."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.version import setbase
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mrconv.baselines import mixer_class

from .config import Experiment, check_key

CONFIGS, CONFIG = "mrconv.configs", "train"
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
        elif key.split(".")[0].split("/")[0] not in ("hydra", "sweep"):
            check_key(key.split(".")[0])


def spelled_out(overrides: Sequence[str]) -> list[str]:
    """Return the settings as Hydra takes them: task.rate is rate, other task.KEY and mixer.KEY are options of those."""
    found = []
    for text in overrides:
        if text.startswith("task."):
            name = text.removeprefix("task.")
            text = name if name.startswith("rate=") else f"task_options.{name}"
        elif text.startswith("mixer."):
            text = f"mixer_options.{text.removeprefix('mixer.')}"
        found.append(f"++{text}" if text.startswith(("task_options", "mixer_options")) else text)
    return found


def composed(overrides: Sequence[str]) -> Experiment:
    """Return the experiment that these settings make."""
    check_overrides(overrides)
    overrides = spelled_out(overrides)
    try:
        with initialize_config_module(CONFIGS, version_base="1.3"):
            return _experiment(hydra_compose(CONFIG, list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        cause = error.__cause__ or error
        key = getattr(cause, "full_key", None)
        raise ValueError((f"{key}: " if key else "") + str(cause).strip().splitlines()[0]) from error


def _experiment(config: Any) -> Experiment:
    """Return the experiment; a ready one with another mixer than its own goes by another name."""
    experiment = Experiment.make(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]
    if experiment.mixer != "conv":  # of ConvNeXt, on pictures
        mixer_class(experiment.mixer)  # or tell that there is none
    known = ready(experiment.name)
    if known and known.get("mixer", "mrconv") != experiment.mixer:
        experiment.name += f"-{experiment.mixer}"
    return experiment


def ready(name: str) -> dict[str, Any]:
    """Return what the file of a ready experiment says; nothing if there is none of that name."""
    file = resources.files(CONFIGS) / "experiment" / f"{name}.yaml"
    return dict(OmegaConf.create(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def launch(arguments: Sequence[str], job: Callable[[Experiment, Path], None]) -> None:
    """Run jobs as Hydra does: one, or with -m a sweep, through whatever launcher and sweeper are asked for."""

    def task(config: Any) -> None:
        job(_experiment(config), Path(HydraConfig.get().runtime.output_dir))

    task.__module__ = __name__
    # What hydra.main does, but for reading sys.argv: there it has to find what was typed, to start more processes.
    setbase("1.3")
    parser = get_args_parser()
    _run_hydra(parser.parse_args(spelled_out(arguments)), parser, task, f"pkg://{CONFIGS}", CONFIG)
