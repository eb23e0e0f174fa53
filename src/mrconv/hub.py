"""Save and load models: safetensors weights and a JSON config, locally or on the Hugging Face hub."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ._utils.extras import needs
from ._utils.model_card import MARK, model_card
from ._utils.option_types import check_types
from ._utils.plugins import plugins_of_record
from ._utils.weight_header import Header, WithoutInitialValues, check_same_dtypes, check_sizes, read_header
from .config import Config, check_constraints, documented
from .kernels.protocol import KERNELS
from .layer import FORMAT_VERSION, MRConv
from .mixers import MIXERS

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
MODEL, MERGED = "model", "merged"
"""Subfolders of a run with its trained and its merged model."""
RUN_FOLDERS = ("runs", "results")
"""Folders of runs, which are no names of users on the hub."""
HEADER = ("architecture", "format_version", "plugins")
FACTORY = ("device", "dtype")


class _LocalMixin:
    """The local part of `huggingface_hub.ModelHubMixin`, for installations without that package."""

    def __init_subclass__(cls, **card: Any) -> None:
        super().__init_subclass__()

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        options.pop("model_card_kwargs", None)  # the card already exists
        if options:
            raise ImportError(needs(f"save_pretrained({', '.join(options)})", "huggingface_hub", "hub"))
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        self._save_pretrained(Path(save_directory))  # type: ignore[attr-defined]

    def push_to_hub(self, *_: Any, **options: Any) -> None:
        raise ImportError(needs("push_to_hub", "huggingface_hub", "hub"))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Any:
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            from_hub = needs("loading from the hub", "huggingface_hub", "hub")
            raise FileNotFoundError(f"{folder} is not a folder; {from_hub}")
        saved = json.loads((folder / CONFIG).read_text())
        return cls._from_pretrained(model_id=str(folder), **(saved | options))  # type: ignore[attr-defined]


try:
    from huggingface_hub import ModelHubMixin as _Mixin
except ImportError:
    _Mixin = _LocalMixin  # type: ignore[assignment, misc]


class Model(nn.Module, _Mixin, library_name="mrconv"):
    """Base class of models: `Model(**options)`, `Model.from_config(config)` or `Model.from_pretrained(folder)`.

    A subclass sets `config_class` and creates its modules from `self.config` in `build`.
    """

    config_class: ClassVar[type[Config]]
    config: Config
    results: dict[str, Any]
    """Facts about the training run, saved with the weights and shown in the model card: name, task, scores by split."""

    def __init_subclass__(cls, **card: Any) -> None:
        super().__init_subclass__(**card)
        if "config_class" in vars(cls):
            documented(cls.config_class)(cls)
            parameters = inspect.signature(cls.config_class).parameters.values()
            cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
                sorted(parameters, key=lambda parameter: parameter.default is not inspect.Parameter.empty)
            )

    def __init__(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None, **options: Any
    ) -> None:
        """Build the model from the values of its config, on the given device and in the given dtype."""
        super().__init__()
        self.config, self.results = self.config_class.make(options), {}
        self.build(device=device, dtype=dtype)

    def build(self, **factory: Any) -> None:
        """Create the modules; `factory` is the device and dtype."""
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: Config | dict[str, Any], **overrides: Any) -> Self:
        """Build from a config or a dictionary of its values, such as the contents of config.json."""
        options = config if isinstance(config, dict) else vars(config)
        return cls(**{name: value for name, value in options.items() if name not in HEADER} | overrides)

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> Any:
        """Write weights, config and model card into a folder, each file atomically.

        The options are those of `huggingface_hub.ModelHubMixin.save_pretrained`, such as `push_to_hub`;
        `model_card_kwargs` may contain a `license`. An edited model card is kept.
        """
        folder = Path(save_directory)
        parameters = sum(p.numel() for p in self.parameters())
        card = model_card(self._config_json(), parameters, self.results, **(options.get("model_card_kwargs") or {}))
        folder.mkdir(parents=True, exist_ok=True)
        if options.get("push_to_hub"):
            options.setdefault("repo_id", folder.name)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as stage:
            (Path(stage) / CARD).write_text(card, encoding="utf-8")
            mode = (Path(stage) / CARD).stat().st_mode
            result = super().save_pretrained(stage, **options)
            kept = (folder / CARD).exists() and MARK not in (folder / CARD).read_text(encoding="utf-8")
            for path in Path(stage).iterdir():
                path.chmod(mode)  # safetensors makes its file readable by the owner only
                if path.name != CARD or not kept:
                    os.replace(path, folder / path.name)
        return result

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> Self:
        """Load from a folder or, with huggingface_hub, from the hub; options override the saved config.

        A name on the hub is USER/MODEL. A `Path`, or a name like a path (`is_local`), is a folder. `device` and `dtype`
        are options too; the saved config does not set them.
        """
        given = str(pretrained_model_name_or_path)
        if isinstance(pretrained_model_name_or_path, Path) or (options.get("revision") is None and is_local(given)):
            _check_folder(given)
        return super().from_pretrained(given, **({"device": None, "dtype": None} | options))

    def current_config(self) -> Config:
        """Return the config that rebuilds the model in its present state: merged or not, and at which rate."""
        layers = [m for m in self.modules() if isinstance(m, MRConv)]
        states = {(layer.merged, layer.rate) for layer in layers}
        if len(states) > 1:
            raise ValueError("the layers are not all merged, or not at the same rate: merge all of them or none")
        state: dict[str, Any] = dict(zip(("merged", "rate"), states.pop(), strict=True)) if states else {}
        return dataclasses.replace(self.config, **{name: x for name, x in state.items() if hasattr(self.config, name)})

    def _config_json(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        header: dict[str, Any] = {"architecture": type(self).__name__, "format_version": FORMAT_VERSION}
        if plugins := self._plugins():
            header["plugins"] = plugins
        return header | dataclasses.asdict(self.current_config())

    def _plugins(self) -> list[str]:
        """Return the modules outside of mrconv that register the kernel and the mixer of the config."""
        kernel, mixer = (getattr(self.config, name, None) for name in ("kernel", "mixer"))
        return sorted({module for module in (KERNELS.plugin(kernel), MIXERS.plugin(mixer)) if module is not None})

    def _save_pretrained(self, save_directory: Path) -> None:
        state = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        metadata = {"format": "pt", "mrconv_format_version": str(FORMAT_VERSION), "results": json.dumps(self.results)}
        save_file(state, save_directory / WEIGHTS, metadata)
        (save_directory / CONFIG).write_text(json.dumps(self._config_json(), indent=2) + "\n")

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        architecture: str | None = None,
        format_version: int = 0,
        plugins: object = (),
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        proxies: dict[str, str] | None = None,
        resume_download: bool | None = None,
        **options: Any,
    ) -> Self:
        if architecture not in [base.__name__ for base in cls.__mro__]:
            raise ValueError(f"{model_id} contains a {architecture}, not a {cls.__name__}: load it with that class")
        if type(format_version) is not int:
            raise ValueError(f"{model_id}: format_version must be an integer; got {format_version!r}")
        if format_version > FORMAT_VERSION:
            raise ValueError(
                f"{model_id} has format {format_version}; this mrconv reads up to {FORMAT_VERSION}: upgrade mrconv"
            )
        weights = Path(model_id) / WEIGHTS
        if not Path(model_id).is_dir():
            from huggingface_hub import hf_hub_download

            arguments = {"proxies": proxies, "resume_download": resume_download}  # of huggingface_hub before 1.0
            older: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
            weights = Path(
                hf_hub_download(
                    model_id,
                    WEIGHTS,
                    revision=revision,
                    cache_dir=cache_dir,
                    force_download=force_download,
                    local_files_only=local_files_only,
                    token=token,
                    **older,
                )
            )
        header = read_header(weights)
        if options.get("dtype") is None:
            options["dtype"] = header.dtype
        with plugins_of_record(model_id, plugins):
            cls._check_weights(options, header)
            model = cls(**options)
        model.load_state_dict(load_file(weights))
        model.results = header.results
        return model.eval()

    @classmethod
    def _check_weights(cls, options: dict[str, Any], header: Header) -> None:
        """Reject a config that does not fit the weights before memory is allocated for it: build on the meta device."""
        config = cls.config_class.make({name: each for name, each in options.items() if name not in FACTORY})
        check_types(config)
        check_constraints(config)
        check_sizes(config, header)
        registered = (KERNELS, getattr(config, "kernel", None)), (MIXERS, getattr(config, "mixer", None))
        classes = [cls, *(kind.get(name) for kind, name in registered if name not in (None, "conv"))]
        if all(each.__module__.startswith("mrconv.") for each in classes):  # other classes may not support meta
            with torch.random.fork_rng(devices=[]), WithoutInitialValues():
                model = cls(**(options | {"device": "meta"}))
            model.load_state_dict(header.tensors)
            check_same_dtypes(model, header)


def is_local(name: str) -> bool:
    """Return whether a name is that of a folder, which may be missing, and not USER/MODEL on the hub."""
    folder = Path(name)
    if folder.is_dir() or folder.is_absolute() or name.startswith((".", "~")) or len(folder.parts) != 2:
        return True
    return folder.parent.name in RUN_FOLDERS or folder.parent.is_dir()


def _check_folder(name: str) -> None:
    """Raise FileNotFoundError if a folder does not exist or holds no model, ValueError if its config is not JSON."""
    folder = Path(name)
    if not folder.is_dir():
        hint = "; to load a model of this name from the hub, set revision='main'" if len(folder.parts) == 2 else ""
        raise FileNotFoundError(f"{name} does not exist{hint}")
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{name} has no {file}: save_pretrained did not write this folder")
    read_json(folder / CONFIG)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a JSON object")
    return content


def model_folder(folder: Path, *names: str) -> Path:
    """Return the first existing subfolder of a run among `names` (MODEL, MERGED), or the folder itself."""
    return next((folder / name for name in names if (folder / name / CONFIG).exists()), folder)
