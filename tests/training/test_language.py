"""Language models: training, evaluation in bits, merging, resuming, records and generation."""

import json
import math

import pytest
import torch

from mrconv import LanguageModel
from mrconv.cli import main
from mrconv.tasks.window_loader import IGNORED
from mrconv.training import Experiment, loop, report, result_files
from mrconv.training.evaluation import evaluate, merge
from mrconv.training.figures import learning_curves
from mrconv.training.module import Training, build_model
from mrconv.training.scores import SCORES, RunningScore, is_better
from mrconv.training.targets import Target, cross_entropy

from .miniature import data, listops, stopping_trainer

pytestmark = pytest.mark.usefixtures("without_figures")

SENTENCE = "the cat sat on the mat; the dog did not. "


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "cats.txt"
    path.write_text(SENTENCE * 60)
    return path


def language(text, **changes):
    """Return an experiment on a repeated sentence."""
    options = {"length": 32, "passes": 2} | changes.pop("task_options", {})
    model = {"block_norm": "layer", "prenorm": True, "kernel_size": 8, "d_model": 16, "batch_size": 8, "lr": 0.02}
    where = {"data": str(text), "data_dir": str(text.parent / "data"), "task": "characters", "accelerator": "cpu"}
    values = where | model | {"name": "cats", "depth": 2, "epochs": 4, "dropout": 0.1} | changes
    return Experiment(task_options=options, **values)


@pytest.fixture(scope="module")
def trained(text):
    folder = text.parent / "trained"
    return folder, loop.train(language(text), folder, quiet=True)


def test_training_and_evaluation_in_bits(trained, text):
    folder, result = trained
    assert result["metric"] == "bits"
    assert result["watched"] == "val/bits"  # codespell:ignore watched
    assert result["bits"]["test"] < 1.5 < math.log2(len(set(SENTENCE)))
    assert result["examples"] == {"train": 2213, "val": 123, "test": 123}
    assert result["merged_bits"] == pytest.approx(result["bits"], abs=1e-5)
    assert evaluate(folder, device="cpu") == result["merged_bits"]
    assert evaluate(folder, ["task.context=24"], device="cpu")["test"] < result["bits"]["test"]
    assert merge(folder)[1] < 1e-4


def test_another_alphabet_raises(trained, tmp_path):
    (tmp_path / "dogs.txt").write_text("THE DOG SAT ON THE LOG. " * 60)
    with pytest.raises(ValueError, match=r"vocabulary of the data, 13 symbols, differs from that of the model in"):
        evaluate(trained[0], [f"data={tmp_path / 'dogs.txt'}"], device="cpu")


def test_the_epoch_of_the_fewest_bits_is_the_best(trained):
    folder, result = trained
    history = torch.load(folder / "last.ckpt", weights_only=True)["mrconv"]["history"]
    bits = [row["val/bits"] for row in history]
    assert result["best_epoch"] == 1 + bits.index(min(bits))
    assert all(row["val/bits"] == pytest.approx(row["val/loss"] / math.log(2)) for row in history)
    assert result["bits"]["val"] == pytest.approx(min(bits), rel=1e-4)


def test_lower_bits_and_higher_accuracy_are_better():
    assert is_better("bits", 1.0, 2.0)
    assert is_better("accuracy", 0.2, 0.1)
    for name in SCORES:
        assert not is_better(name, 0.5, 0.5)
        assert not is_better(name, math.nan, 0.5)
        assert is_better(name, 0.5, math.nan)
        assert not is_better(name, math.nan, math.nan)


def test_ignored_positions_do_not_count():
    logits, y = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    y[1, 2:] = IGNORED
    kept = y != IGNORED
    expected = torch.nn.functional.cross_entropy(logits[kept], y[kept])
    assert cross_entropy(logits, y) == pytest.approx(expected.item())
    scores = RunningScore(SCORES["bits"])
    scores.update(logits, y, cross_entropy(logits, y))
    scores.update(logits[:1], y[:1], cross_entropy(logits[:1], y[:1]))
    joined = torch.cat([logits[kept], logits[0]]), torch.cat([y[kept], y[0]])
    both = torch.nn.functional.cross_entropy(*joined).item()
    assert {k: v.item() for k, v in scores.compute_and_reset().items()} == pytest.approx(
        {"loss": both, "bits": both / math.log(2)}
    )


def test_a_text_task_builds_a_language_model():
    tiny = data("characters")
    model = build_model(listops(), tiny)
    assert isinstance(model, LanguageModel)
    assert model.config.vocab_size == 10
    with pytest.raises(ValueError, match="bidirectional"):
        build_model(listops(bidirectional=True), tiny)
    training = Training(listops(), model, Target(), SCORES["bits"], 5, ["val"])
    assert training.scores["val"].compute_and_reset() == {}


@pytest.mark.parametrize("loader", ["resident", "workers"])
def test_a_stopped_run_resumes_bit_for_bit(trained, text, tmp_path, monkeypatch, loader):
    make_trainer, experiment = loop.make_trainer, language(text, loader=loader)
    monkeypatch.setattr(loop, "make_trainer", stopping_trainer(20))
    with pytest.raises(SystemExit):
        loop.train(experiment, tmp_path / "run", quiet=True)
    monkeypatch.setattr(loop, "make_trainer", make_trainer)
    assert loop.train(experiment, tmp_path / "run", quiet=True)["bits"] == trained[1]["bits"]


def test_results_and_figures_name_the_unit(trained, capsys):
    folder, result = trained
    (line,) = report.lines(result_files.collect([folder]))
    assert line["test"] == f"{result['bits']['test']:.3f} bits"
    assert (line["paper"], line["notes"]) == ("–", "–")
    learning_curves(folder, folder / "curves.png")
    assert (folder / "curves.png").stat().st_size > 0
    assert main(["evaluate", str(folder), "--device", "cpu"]) == 0
    header, _, test, *_ = (line.split() for line in capsys.readouterr().out.splitlines())
    assert dict(zip(header, test, strict=True))["bits"] == f"{result['merged_bits']['test']:.4g}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": "beauty"}, "'metric' must be one of accuracy, bits, mae; got \"beauty\""),
        ({"bits": {"test": -1.0}}, "'bits' of test must be 0 or more"),
        ({"bits": None}, "'bits' cannot be null"),
    ],
)
def test_invalid_results_are_reported(trained, tmp_path, change, message):
    (tmp_path / "result.json").write_text(json.dumps(trained[1] | change))
    with pytest.raises(ValueError, match=r"result\.json") as error:
        result_files.collect([tmp_path])
    assert message in str(error.value)


@pytest.mark.parametrize("branches", [[], ["--branches"]])
def test_generate_matches_the_parallel_form(trained, capsys, branches):
    folder, _ = trained
    command = ["generate", str(folder), "--prompt", "the cat", "--tokens", "60", "--temperature", "0", *branches]
    assert main(command) == 0
    output = capsys.readouterr().out
    vocabulary = json.loads((folder / "model" / "inputs.json").read_text())["vocabulary"]
    model = LanguageModel.from_pretrained(folder / "model")
    tokens = torch.tensor([[vocabulary.index(c) for c in "the cat"]])
    with torch.no_grad():
        for _ in range(60):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    assert output == "".join(vocabulary[i] for i in tokens[0]) + "\n"


def test_generate_depends_on_its_seed_and_stops(trained, capsys):
    folder, _ = trained

    def generated(*options):
        assert main(["generate", str(folder), "--prompt", "the", "--tokens", "40", *options]) == 0
        return capsys.readouterr().out

    assert generated("--seed", "1") == generated("--seed", "1") != generated("--seed", "2")
    assert generated("--top-k", "1") == generated("--temperature", "0") == generated("--top-p", "0.001")
    stopped = generated("--seed", "3", "--stop", " ")[3:-1]
    assert stopped.count(" ") == 1
    assert stopped.endswith(" ")
    copy = folder.parent / "elsewhere"
    (folder / "merged").rename(copy)
    copied = main(["generate", str(copy), "--prompt", "the", "--tokens", "3"])
    copy.rename(folder / "merged")
    assert copied == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "the ñandú"], "argument --prompt: not in the text that the model was trained on: 'ñ', 'ú'"),
        (["--stop", "Q"], "argument --stop: not in the text that the model was trained on: 'Q'"),
        (["--prompt", ""], "argument --prompt: must not be empty"),
        (["--temperature", "-1"], "temperature must not be negative"),
        (["--top-p", "2"], "top_p must be in (0, 1]"),
        (["--tokens", "0"], "argument --tokens: must be a positive integer"),
    ],
)
def test_errors_are_reported_in_one_line(trained, capsys, options, message):
    with pytest.raises(SystemExit) as stop:
        main(["generate", str(trained[0]), "--prompt", "the", *options])
    assert stop.value.code == 2
    out, error = capsys.readouterr()
    assert message in error
    assert error.count("\n") == 1
    assert not out


def test_models_that_cannot_generate_are_reported(trained, tmp_path, capsys):
    build_model(listops(), data("listops")).save_pretrained(tmp_path / "classifier")
    LanguageModel(vocab_size=5, d_model=4, depth=1, l_max=8).save_pretrained(tmp_path / "undescribed")
    (tmp_path / "undescribed" / "inputs.json").write_text('{"kind": "text", "length": 8, "vocabulary": ["a"]}')
    for folder, message in (
        ("classifier", "classifier holds a SequenceClassifier"),
        ("undescribed", "inputs.json describes another model, with 1 symbols and 0 classes; this model has 5 symbols"),
        ("nowhere", "nowhere does not exist"),
    ):
        with pytest.raises(SystemExit):
            main(["generate", str(tmp_path / folder), "--prompt", "the"])
        assert message in capsys.readouterr().err
