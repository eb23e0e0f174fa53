"""Saving and loading: safetensors, a JSON config, trained and merged."""

import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from mrconv import LanguageModel, SequenceClassifier, reparameterize
from mrconv.cli import main
from mrconv.config import ClassifierConfig
from mrconv.inference import load_model

from .conftest import randomise

OPTIONS = {"n_classes": 3, "vocab_size": 7, "d_model": 8, "depth": 2, "l_max": 64, "kernel_size": 2}


def build(**options):
    return randomise(SequenceClassifier(**(OPTIONS | options))).eval()


@pytest.mark.parametrize("kind", ["dense", "dilated", "fourier", "sparse", "fourier+sparse"])
@pytest.mark.parametrize("merged", [False, True])
def test_a_saved_model_loads_identically(tmp_path, kind, merged):
    model = build(kernel=kind, bidirectional=True)
    if merged:
        reparameterize(model)
    model.save_pretrained(tmp_path)
    loaded = SequenceClassifier.from_pretrained(tmp_path)
    tokens = torch.randint(7, (2, 50))
    assert torch.equal(loaded(tokens), model(tokens))
    assert not loaded.training
    assert loaded.backbone.blocks[0].layer.merged is merged
    assert loaded.config.merged is merged
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors"} <= names <= {"config.json", "model.safetensors", "README.md"}
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # whoever can read one can read all


def test_config_file_is_flat_and_versioned(tmp_path):
    build(combine="concat", decay=(1.0, 2.0)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == "SequenceClassifier"
    assert config["format_version"] == 2
    assert config["decay"] == [1.0, 2.0]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["mrconv_format_version"] == "2"
    SequenceClassifier.from_pretrained(tmp_path)


def test_a_model_merged_at_a_rate_loads_at_that_rate(tmp_path):
    model = reparameterize(build(d_input=1, vocab_size=None, kernel_size=4), rate=0.5)
    model.save_pretrained(tmp_path)
    loaded = SequenceClassifier.from_pretrained(tmp_path)
    x = torch.randn(2, 30, 1)
    assert torch.equal(loaded(x), model(x))
    with pytest.raises(ValueError, match=r"merged at rate 0\.5"):
        loaded(x, rate=1.0)


def test_options_can_be_overridden_while_loading(tmp_path):
    build().save_pretrained(tmp_path)
    loaded = SequenceClassifier.from_pretrained(tmp_path, backend="reference", dtype=torch.float64)
    assert loaded.backbone.blocks[0].layer.backend == "reference"
    assert loaded.head.weight.dtype == torch.float64


def test_the_saved_config_does_not_set_the_device(tmp_path):
    build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"device": "meta", "dtype": "float16"}))
    weight = SequenceClassifier.from_pretrained(tmp_path).head.weight
    assert (weight.device.type, weight.dtype) == ("cpu", torch.float32)
    assert SequenceClassifier.from_pretrained(tmp_path, dtype=torch.float64).head.weight.dtype == torch.float64


def test_wrong_class_and_newer_format_raise(tmp_path):
    build().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="contains a SequenceClassifier, not a LanguageModel"):
        LanguageModel.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"format_version": 3}))
    with pytest.raises(ValueError, match="has format 3; this mrconv reads up to 2"):
        SequenceClassifier.from_pretrained(tmp_path)


def test_errors_name_folders_without_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        SequenceClassifier.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        SequenceClassifier.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["runs/nope", "results/nope", "mine/nope", "nope", Path("someone/nope")])
def test_a_missing_folder_is_not_looked_up_on_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    looked_up = []

    def look_up(repo_id, *_, **options):
        looked_up.append(repo_id)
        raise ConnectionError

    for module in (huggingface_hub, huggingface_hub.hub_mixin):
        monkeypatch.setattr(module, "hf_hub_download", look_up)
    with pytest.raises(FileNotFoundError, match="nope does not exist"):
        SequenceClassifier.from_pretrained(name)
    assert looked_up == []
    with pytest.raises(ConnectionError):
        SequenceClassifier.from_pretrained("mine/nope", revision="main")
    assert set(looked_up) == {"mine/nope"}


class Mine(SequenceClassifier):
    """A user-defined subclass."""


def test_a_subclass_loads_a_checkpoint_of_its_parent(tmp_path):
    build().save_pretrained(tmp_path)
    assert isinstance(Mine.from_pretrained(tmp_path), Mine)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_loads_in_its_saved_dtype(tmp_path, dtype):
    model = build().to(dtype)
    model.save_pretrained(tmp_path)
    loaded = SequenceClassifier.from_pretrained(tmp_path)
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(model.parameters(), loaded.parameters(), strict=True)
    )


def test_a_config_round_trips_through_json(tmp_path):
    model = build(combine="concat", decay=(1.0, 2.0))
    model.save_pretrained(tmp_path)
    loaded = SequenceClassifier.from_pretrained(tmp_path)
    assert loaded.config == model.config
    saved = json.loads((tmp_path / "config.json").read_text())
    assert SequenceClassifier.from_config(saved).config == model.config
    assert SequenceClassifier.from_config(saved, merged=True).backbone.blocks[0].layer.merged


def test_saving_a_half_merged_model_raises_and_keeps_the_saved_files(tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model.backbone.blocks[0].layer.reparameterize()
    with pytest.raises(ValueError, match="not all merged, or not at the same rate"):
        model.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_from_config_takes_a_dataclass_or_a_dictionary():
    config = ClassifierConfig(**OPTIONS)
    for given in (config, OPTIONS):
        assert SequenceClassifier.from_config(given).config == config


def test_saving_and_loading_work_without_huggingface_hub(tmp_path):
    code = f"""
import sys, torch
sys.modules["huggingface_hub"] = None
from mrconv import SequenceClassifier
model = SequenceClassifier(**{OPTIONS!r}).eval()
model.save_pretrained({str(tmp_path)!r})
x = torch.randint(7, (2, 9))
assert torch.equal(SequenceClassifier.from_pretrained({str(tmp_path)!r})(x), model(x))
try:
    SequenceClassifier.from_pretrained("someone/somewhere")
except FileNotFoundError as error:
    assert "needs huggingface_hub: install mrconv with its extra 'hub'" in str(error)
else:
    raise AssertionError
for push in (lambda: model.push_to_hub("a/b"), lambda: model.save_pretrained({str(tmp_path)!r}, push_to_hub=True)):
    try:
        push()
    except ImportError as error:
        assert "needs huggingface_hub: install mrconv with its extra 'hub'" in str(error)
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_core_needs_torch_numpy_and_safetensors_only():
    code = """
import sys
import torch, numpy, safetensors.torch
sys.modules["huggingface_hub"] = None
before = set(sys.modules)
import mrconv
new = {name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert new <= {"mrconv", "torch", "numpy", "safetensors"}, new
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def parsed(card):
    """Return a card's metadata and its text."""
    _, header, text = card.read_text().split("---\n", 2)
    return yaml.safe_load(header), text


@pytest.mark.parametrize("merged", [False, True])
def test_the_model_card_contains_config_results_and_licence(tmp_path, merged):
    model = build()
    model.results = {"name": "mine", "task": "listops", "accuracy": {"val": 0.5, "test": 0.4321}, "epochs": 3}
    if merged:
        reparameterize(model)
    model.save_pretrained(tmp_path)
    header, text = parsed(tmp_path / "README.md")
    assert (header["license"], header["library_name"]) == ("apache-2.0", "mrconv")
    (entry,) = header["model-index"]
    assert entry["name"] == "mine"
    assert [m["value"] for m in entry["results"][0]["metrics"]] == [0.5, 0.4321]
    for words in ("| test accuracy | 43.21% |", "| epochs | 3 |", "Trained on listops", "Licence: apache-2.0"):
        assert words in text
    assert ("merged into one kernel" in text) is merged
    shown = json.loads(text.split("```json\n")[1].split("```")[0])
    assert shown == json.loads((tmp_path / "config.json").read_text())
    assert SequenceClassifier.from_pretrained(tmp_path).results == model.results


def test_the_hub_parser_accepts_the_model_card(tmp_path):
    model = build()
    model.results = {"name": "mine", "task": "listops", "accuracy": {"test": 0.4321}}
    model.save_pretrained(tmp_path, model_card_kwargs={"license": "mit"})
    data = huggingface_hub.ModelCard.load(tmp_path / "README.md").data
    assert data.license == "mit"
    assert data.eval_results[0].metric_value == 0.4321
    with pytest.raises(TypeError, match="licence"):
        model.save_pretrained(tmp_path, model_card_kwargs={"licence": "mit"})


def test_saving_updates_the_model_card_unless_it_was_edited(tmp_path):
    model, card = build(), tmp_path / "README.md"
    model.save_pretrained(tmp_path)
    model.results = {"task": "listops", "accuracy": {"test": 0.5}}
    model.save_pretrained(tmp_path)
    assert "50.00%" in card.read_text()
    card.write_text("mine")
    model.save_pretrained(tmp_path)
    assert card.read_text() == "mine"


@pytest.mark.parametrize("merged", [False, True])
def test_pushed_files_are_safe_and_load_from_the_hub(tmp_path, monkeypatch, merged):
    model = build()
    model.results = {"task": "listops", "accuracy": {"test": 0.5}}
    if merged:
        reparameterize(model)
    hub = tmp_path / "hub"

    class Api:
        def __init__(self, token=None):
            pass

        def create_repo(self, repo_id, private, exist_ok):
            return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

        def upload_folder(self, repo_id, folder_path, **options):
            shutil.copytree(folder_path, hub / repo_id)
            return "done"

    def download(repo_id, filename, **options):
        return str(hub / repo_id / filename)

    monkeypatch.setattr(huggingface_hub.hub_mixin, "HfApi", Api)
    for module in (huggingface_hub, huggingface_hub.hub_mixin):
        monkeypatch.setattr(module, "hf_hub_download", download)
    assert model.push_to_hub("someone/somewhere") == "done"
    files = {path.name for path in (hub / "someone/somewhere").iterdir()}
    assert files == {"README.md", "config.json", "model.safetensors"}
    loaded = SequenceClassifier.from_pretrained("someone/somewhere")
    tokens = torch.randint(7, (2, 30))
    assert torch.equal(loaded(tokens), model(tokens))
    assert loaded.results == model.results
    assert "50.00%" in (hub / "someone/somewhere/README.md").read_text()


class Trap:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_loading_executes_no_code_from_the_files(tmp_path):
    sprung, folder = tmp_path / "sprung", tmp_path / "saved"
    build().save_pretrained(folder)
    pickle.loads(pickle.dumps(Trap(sprung)))
    assert sprung.exists()  # the trap works
    sprung.unlink()
    for name in ("pytorch_model.bin", "model.pt", "model.safetensors"):
        torch.save({"head.weight": Trap(sprung)}, folder / name)
    with pytest.raises(SafetensorError, match=r"saved/model\.safetensors cannot be read: "):
        SequenceClassifier.from_pretrained(folder)
    build().save_pretrained(folder)
    SequenceClassifier.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    code = f"__import__('pathlib').Path({str(sprung)!r}).touch()"
    for changes in ({"architecture": code}, {"architecture": "os.system"}, {"architecture": "reparameterize"}):
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match="is not a model of mrconv"):
            load_model(folder)
    for changes in ({"kernel": code}, {"auto_map": code}, {"d_model": code}):
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=r"kernel|auto_map|d_model"):
            load_model(folder)
    assert not sprung.exists()


def test_errors_name_damaged_and_foreign_folders(tmp_path):
    model = SequenceClassifier(n_classes=2, vocab_size=5, d_model=4, depth=1, l_max=16)
    for name in ("cut", "key", "shape"):
        model.save_pretrained(tmp_path / name)
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    for name, change in (("key", {"colour": "red"}), ("shape", {"d_model": 8})):
        config = tmp_path / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    for name in ("cut", "key", "shape"):
        with pytest.raises(ValueError, match=f"{name} cannot be loaded: .+"):
            load_model(tmp_path / name)


def change_config(folder, **changes):
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 10**5}, "depth is 100000, but the weights are"),
        ({"depth": 300, "d_model": 1}, "the model has 300 blocks, but the weights are"),
        ({"d_model": 30_000}, "d_model is 30000, but the weights are"),
        ({"heads": 10**6}, r"heads is 1e\+06, but the weights are"),
        ({"l_max": 10**9}, "size mismatch for backbone.blocks.0.layer"),
        ({"l_max": 10**9, "kernel": "sparse"}, r"blocks.0.layer.branches.0.kernel.(taps|index)"),
        ({"mixer": "longconv", "l_max": 10**9}, "backbone.blocks.0.layer.k"),
        ({"mixer": "s4", "mixer_options": {"d_state": 4000}}, "d_state must be at most 2048; got 4000"),
        ({"rate": 1e9}, r"rate must be at most 1,000, .*; got 1e\+09"),
        ({"pool": None}, "pool must be one of mean, last; got None"),
        ({"momentum": "x"}, "momentum must be a number or null; got 'x'"),
        ({"depth": "2"}, "depth must be an integer; got '2'"),
        ({"mixer_options": 1}, "mixer_options must be an object or null; got 1"),
        ({"format_version": "2"}, "format_version must be an integer; got '2'"),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_rejected_before_anything_is_allocated(
    tmp_path, monkeypatch, changes, message
):
    build().save_pretrained(tmp_path)
    change_config(tmp_path, **changes)
    built, make = [], SequenceClassifier.build
    monkeypatch.setattr(SequenceClassifier, "build", lambda self, **given: built.append(given) or make(self, **given))
    with pytest.raises(ValueError, match=message) as error:
        load_model(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert all(given["device"] == "meta" for given in built)


def test_a_backend_that_cannot_run_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("mrconv.inference.saved_models.triton_unavailable", lambda _: "there is no GPU")
    build(backend="triton").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json: backend='triton' cannot run here: there is no GPU; set"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("head.weight", torch.zeros(3, 8, dtype=torch.int64), r"head\.weight is torch\.int64 in the weights"),
        ("head.weight", torch.zeros(3, 8, dtype=torch.int8), r"head\.weight has dtype I8; models have"),
        ("head.weight", torch.zeros(8, 3), "size mismatch for head.weight"),
        ("extra", torch.zeros(1), "Unexpected key"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(tmp_path, name, value, message):
    build().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    save_file(load_file(weights) | {name: value}, weights)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_a_model_is_loaded_by_huggingface_hub_before_1_0(tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    loaded = type(model)._from_pretrained(model_id=str(tmp_path), proxies=None, resume_download=None, **config)
    assert torch.equal(loaded.head.weight, model.head.weight)


@pytest.mark.parametrize(
    "name", ["backbone.blocks.1.layer.branches.0.norm.running_var", "backbone.encoder.weight", "head.weight"]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_reported_in_one_line(tmp_path, capsys, name, value):
    model = build()
    model.state_dict()[name].view(-1)[1] = value
    model.save_pretrained(tmp_path)
    for command in (["info"], ["predict", "--text", "a"]):
        with pytest.raises(SystemExit) as stop:
            main([command[0], str(tmp_path), *command[1:]])
        assert stop.value.code == 2
        assert re.search(rf"error: {tmp_path}: {re.escape(name)} holds NaN or infinity", capsys.readouterr().err)
