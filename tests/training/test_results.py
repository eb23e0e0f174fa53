import dataclasses
import json
import statistics

import pytest

from mrconv.cli import results as command
from mrconv.cli.parser import CommandError, Parser
from mrconv.training import paper_numbers as paper
from mrconv.training import report
from mrconv.training.composition import compose
from mrconv.training.result_files import collect


def result(name="listops-base", seed=0, test=0.62, **other):
    environment = {"hardware": "NVIDIA H200", "revision": "2916deb872ce9366b7942ff706799cfdcdacff7d+"}
    return {
        "name": name,
        "task": name.split("-")[0],
        "partial": False,
        "accuracy": {"val": 0.5, "test": test},
        "merged_accuracy": {"val": 0.5, "test": test},
        "watched": "val/accuracy",  # codespell:ignore watched
        "epochs": 40,
        "parameters": 331_786,
        "seconds": 3725.4,
        "seed": seed,
        "examples": {"train": 96_000},
        "environment": environment,
        "config": {"seed": seed, "out": f"runs{seed}", "epochs": 40, "limit_train": 0, "limit_eval": 0, "rate": 1.0},
    } | other


def ran(name, *settings, test=0.62):
    """Return the result of a run with all of its config."""
    config = dataclasses.asdict(compose([f"experiment={name}", *settings]))
    return result(config["name"], config["seed"], test, task=config["task"], epochs=config["epochs"], config=config)


def record(folder, content, metrics=None):
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(content))
    if metrics is not None:
        (folder / "metrics.csv").write_text(metrics)


def only_line(results):
    (line,) = report.lines(results)
    return line


@pytest.mark.parametrize(
    ("size", "kernel", "average"),
    [
        ("base", "dilated", 78.40),
        ("base", "fourier", 87.42),
        ("base", "fourier-sparse", 79.56),
        ("large", "dilated", 79.19),
        ("large", "fourier", 87.84),
        ("large", "fourier-sparse", 79.70),
        ("base", "", 87.81),
        ("large", "", 88.20),
    ],
)
def test_accuracies_have_the_papers_averages(size, kernel, average):
    names = [f"{task}-{size}-{kernel}".rstrip("-") for task in paper.LRA]
    accuracies = [paper.ACCURACIES[name] or 50.0 for name in names]  # it counts a cross as 50
    assert statistics.mean(accuracies) == pytest.approx(average, abs=0.0051)


def test_every_published_name_has_a_best_baseline():
    for name in paper.ACCURACIES:
        published = paper.published(name)
        assert published.baseline
        assert 50 < published.baseline_accuracy < 100
    assert paper.published("listops-base") == paper.Published(62.40, "MEGA", 63.14)
    assert paper.published("pathx-base-dilated").accuracy is None
    assert paper.published("my-run") is None


def test_results_are_collected_at_any_depth_and_copies_once(tmp_path):
    record(tmp_path / "runs" / "b" / "1", result(seed=1))
    record(tmp_path / "runs" / "a", result(seed=0))
    record(tmp_path / "results" / "copy", result(seed=0))
    runs = collect([tmp_path / "results", tmp_path / "runs", tmp_path / "runs" / "a"])
    assert [each["seed"] for each in runs] == [0, 1]
    assert runs[0]["path"] == tmp_path / "results" / "copy" / "result.json"


def test_seeds_are_joined_to_mean_and_standard_deviation():
    runs = [result(seed=0, test=0.61), result(seed=1, test=0.62, seconds=60), result(seed=2, test=0.63)]
    line = only_line(runs)
    assert line["seeds"] == "0, 1, 2"
    assert line["test"] == line["merged"] == "62.00 ± 1.00"
    assert line["difference"] == "−0.40"
    assert line["time"] == "0:01:00 to 1:02:05"


def test_a_run_is_compared_with_the_paper():
    line = only_line([result()])
    assert line["test"] == "62.00"
    assert (line["paper"], line["difference"], line["baseline"]) == ("62.40", "−0.40", "MEGA 63.14")
    assert (line["parameters"], line["epochs"], line["time"]) == ("331,786", "40", "1:02:05")
    assert (line["hardware"], line["revision"], line["notes"]) == ("NVIDIA H200", "2916deb872+", "–")


def test_runs_that_differ_in_more_than_the_seed_are_not_joined():
    other = result(seed=1)
    other["config"] = other["config"] | {"epochs": 20}
    again = result(seed=0, test=0.60)
    assert len(report.lines([result(seed=0), other, again])) == 3


def test_a_key_that_an_earlier_record_lacks_has_its_default():
    earlier, other = ran("text-base"), ran("text-base", "seed=1", "residual=float32")
    del earlier["config"]["residual"]
    assert only_line([earlier, ran("text-base", "seed=1")])["seeds"] == "0, 1"
    without_averages = ran("text-base", "seed=2")
    del without_averages["config"]["precise_stats"]
    assert [line["seeds"] for line in report.lines([earlier, without_averages])] == ["0", "2"]
    assert [line["seeds"] for line in report.lines([earlier, other])] == ["0", "1"]


def test_partial_runs_have_their_own_line_with_the_epochs_done(tmp_path):
    record(tmp_path / "a", result(seed=0, partial=True), "epoch,step\n1,10\n12,120\n")
    record(tmp_path / "b", result(seed=1, partial=True))
    record(tmp_path / "c", result(seed=2))
    lines = report.lines(collect([tmp_path]))
    assert [line["epochs"] for line in lines] == ["12 of 40", "? of 40", "40"]
    assert [line["notes"] for line in lines] == ["partial", "partial", "–"]


def test_missing_values_are_a_dash():
    unknown = result(name="my-run", accuracy={}, merged_accuracy={}, environment={"revision": None})
    line = only_line([unknown])
    for column in ("test", "merged", "paper", "difference", "baseline", "hardware", "revision"):
        assert line[column] == "–"


def test_without_a_test_split_validation_is_reported_and_noted():
    scores = {"accuracy": {"val": 0.811}, "merged_accuracy": {"val": 0.812}}
    line = only_line([ran("imagenet-tiny-fourier") | scores])
    assert (line["test"], line["merged"], line["paper"], line["difference"]) == ("81.10", "81.20", "82.10", "−1.00")
    assert line["notes"].split("; ")[-1] == "validation"
    assert "validation" not in only_line([result()])["notes"]


def test_a_name_is_compared_on_its_own_task_only():
    assert only_line([result(task="pathfinder")])["paper"] == "–"


def test_chance_in_the_paper_gives_no_difference():
    line = only_line([result(name="pathx-base-dilated", epochs=50)])
    assert (line["paper"], line["difference"]) == ("chance", "–")


def test_notes_list_what_differs_from_the_paper():
    changed = ran("text-base", "limit_train=5", "limit_eval=2", "rate=0.5", "epochs=3")
    changed |= {"watched": "test/accuracy", "examples": {"train": 60}}  # codespell:ignore watched
    assert report.notes(changed) == [
        "5 batches an epoch",
        "2 batches evaluated",
        "trained at rate 0.5",
        "3 epochs instead of 32",
        "60 training examples, 25,000 in the paper",
        "epoch chosen by test",
    ]


def test_runs_on_other_classes_are_marked_and_not_compared():
    words = [ran("speech-base", f"seed={seed}", test=0.99) | {"classes": n} for seed, n in enumerate((3, 35))]
    all_words, few = report.lines(words)
    assert (few["paper"], few["difference"], few["notes"]) == ("–", "–", "3 classes, 35 in the paper")
    assert (all_words["paper"], all_words["difference"], all_words["notes"]) == ("96.82", "+2.18", "–")
    assert "| MRConv, base, here | – | – | – | – | – | – | – | 99.00 |" in report.baseline_table(words)
    assert "here" not in report.baseline_table(words[:1])


def test_runs_on_generated_data_are_marked_and_not_averaged_with_others():
    generated = {"data": {"source": "generated", "draws": 7}}
    runs = [ran("listops-base", f"seed={seed}") | generated for seed in (0, 1)]
    first, other = report.lines([*runs, ran("listops-base", "seed=2") | {"data": {"source": "files"}}])
    assert (first["seeds"], first["notes"], first["difference"]) == ("0, 1", "generated data", "−0.40")
    assert (other["seeds"], other["notes"]) == ("2", "–")
    assert "| MRConv, base, here | 62.00 ± 0.00 (generated data) |" in report.baseline_table(runs)


def test_runs_without_a_validation_split_note_the_best_epoch_on_test():
    """A record of an earlier version, whose epoch test chose, has a line of its own."""
    by_test = {"watched": "test/accuracy"}  # codespell:ignore watched
    runs = [
        ran("text-base", f"seed={seed}")
        | by_test
        | {"best_on_test": {"epoch": 20 + seed, "accuracy": 0.88 + 0.01 * seed}}
        for seed in (0, 1)
    ]
    first, earlier = report.lines([*runs, ran("text-base", "seed=2") | by_test])
    assert (first["seeds"], earlier["seeds"]) == ("0, 1", "2")
    assert first["notes"].endswith("last epoch; best on test 88.50 ± 0.71 at epoch 20, 21")
    assert earlier["notes"].endswith("epoch chosen by test")


@pytest.mark.parametrize(
    ("settings", "note"),
    [
        (["lr=0.01", "depth=16"], "depth=16, lr=0.01"),
        (["kernel=dense", "norm=null", "bucket=false"], "kernel=dense, norm=null, bucket=false"),
        (["lr=1", "depth=2", "d_model=8", "dropout=0", "clip=1", "ema=0.5"], "dropout=0.0, d_model=8, depth=2, lr=1.0"),
        (["task.train_size=200"], "task.train_size=200"),
        (["mixer=s4d", "mixer.d_state=8", "kernel_size=1"], "mixer=s4d, kernel_size=1, mixer.d_state=8"),
    ],
)
def test_a_changed_experiment_is_noted_and_not_compared(settings, note):
    changed = ran("listops-base", *settings)
    assert only_line([changed])["notes"].removesuffix(" and 2 more") == note
    assert only_line([changed])["difference"] == "–"
    assert ", here" not in report.baseline_table([changed])


def test_a_changed_baseline_is_noted():
    assert report.notes(ran("listops-mega", "epochs=30", "mixer.d_ema=2")) == [
        "30 epochs instead of 60",
        "mixer.d_ema=2",
    ]


def evaluation(folder, changes, **scores):
    folder.mkdir()
    splits = {split: {"accuracy": score} for split, score in scores.items()}
    (folder / "metrics.json").write_text(json.dumps({"changes": changes, "splits": splits}))


def test_evaluations_with_other_settings_are_noted_if_all_seeds_have_them(tmp_path):
    for seed in (0, 1):
        record(run := tmp_path / f"speech-base-seed{seed}", ran("speech-base", f"seed={seed}", "epochs=9"))
        evaluation(run / "evaluate-rate0.5", {"rate": 0.5}, val=0.1, test=0.8 + 0.1 * seed)
    evaluation(run / "evaluate-rate0.25", {"rate": 0.25}, test=0.4)
    assert only_line(collect([tmp_path]))["notes"].endswith("; rate=0.5: 85.00 ± 7.07")
    assert only_line(collect([run]))["notes"].endswith("; rate=0.25: 40.00; rate=0.5: 90.00")


def test_evaluations_of_a_run_and_of_its_record_are_both_noted(tmp_path):
    for folder, rate in (("runs", 0.5), ("results", 0.25)):
        record(run := tmp_path / folder / "speech-base-seed0", ran("speech-base", "epochs=9"))
        evaluation(run / "evaluate-rate", {"rate": rate}, test=rate)
    assert only_line(collect([tmp_path]))["notes"].endswith("; rate=0.25: 25.00; rate=0.5: 50.00")


@pytest.mark.parametrize(
    ("content", "note"),
    [
        ({"splits": {"test": {"accuracy": 0.5}}}, "–"),  # of an earlier version
        ({"changes": {}, "splits": {"test": {"accuracy": 0.5}}}, "–"),
        ({"changes": {"rate": 2}, "splits": {"test": {"accuracy": None}}}, "–"),  # not finite
        ({"changes": {"rate": 2}, "splits": {"val": {"accuracy": 0.5}}}, "–"),
        ({"changes": {"rate": 2}, "splits": {"test": {"accuracy": 0.5}}}, "rate=2: 50.00"),
    ],
)
def test_evaluations_without_changes_or_scores_are_not_noted(tmp_path, content, note):
    record(run := tmp_path / "listops-base-seed0", ran("listops-base"))
    (run / "evaluate-x").mkdir()
    (run / "evaluate-x" / "metrics.json").write_text(json.dumps(content))
    assert only_line(collect([tmp_path]))["notes"] == note


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[]", "is not an evaluation: it must contain a JSON object"),
        (b"{", "is not JSON"),
        (b"\xff" * 9999, "is not JSON"),
        (b'{"changes": {"rate": 2}}', "must have objects 'changes' and 'splits'"),
        (b'{"changes": {"rate": 2}, "splits": {"test": {"accuracy": 88}}}', "'accuracy' of test must be from 0 to 1"),
    ],
)
def test_a_file_that_is_no_evaluation_is_named(tmp_path, text, message):
    record(run := tmp_path / "listops-base-seed0", ran("listops-base"))
    (run / "evaluate-rate0.5").mkdir()
    (run / "evaluate-rate0.5" / "metrics.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"evaluate-rate0\.5/metrics\.json.*" + message) as raised:
        collect([tmp_path])
    assert len(str(raised.value)) < 400


def test_keys_of_the_machine_are_no_change():
    machine = ["precision=float32", "pad=max", "graphs=false", "compile=true", "data_dir=elsewhere", "out=there"]
    line = only_line([ran("listops-base"), ran("listops-base", "seed=1", *machine)])
    assert (line["seeds"], line["notes"], line["difference"]) == ("0, 1", "–", "−0.40")


@pytest.mark.parametrize("setting", ["limit_train=5", "limit_eval=2", "rate=0.5"])
def test_a_reduced_run_is_not_compared(setting):
    changed = ran("listops-base", setting)
    assert only_line([changed])["difference"] == "–"
    assert ", here" not in report.baseline_table([changed])


def test_each_setting_of_a_sweep_has_a_line():
    runs = [ran("listops-base", f"lr={lr}", f"seed={seed}") for lr in (0.003, 0.01) for seed in (0, 1)]
    assert [(line["seeds"], line["notes"]) for line in report.lines(runs)] == [("0, 1", "–"), ("0, 1", "lr=0.01")]


def test_runs_that_the_paper_reports_come_first():
    runs = [ran(name) for name in ("demo", "text-base", "shakespeare", "image-base")]
    assert [line["run"] for line in report.lines(runs)] == ["text-base", "image-base", "demo", "shakespeare"]


def test_the_table_of_baselines_has_the_mean_of_unchanged_runs():
    runs = [ran("listops-base", f"seed={seed}", test=test) for seed, test in ((0, 0.61), (1, 0.63), (1, 0.62))]
    runs += [ran("listops-base", "lr=0.01", test=0.9), ran("listops-base", test=0.9) | {"partial": True}]
    (here,) = [line for line in report.baseline_table(runs).splitlines() if ", here" in line]
    assert here.startswith("| MRConv, base, here | 62.00 ± 1.00 |")


def test_a_line_is_named_after_what_differs():
    """Also for records from before runs were named so, which join later ones of the same settings."""
    new = ran("listops-base", "lr=0.01", "seed=1")
    old = ran("listops-base", "lr=0.01")
    old["name"] = old["config"]["name"] = "listops-base"
    line = only_line([old, new])
    assert (line["run"], line["seeds"], line["notes"]) == ("listops-base-lr0.01", "0, 1", "lr=0.01")
    former = result(name="listops-ablation-dense") | {"config": {}}
    assert only_line([former])["run"] == "listops-base-ablation-dense"
    assert only_line([former])["paper"] == "49.25"
    other = only_line([ran("listops-base", "mixer=s4d")])
    assert (other["run"], other["paper"]) == ("listops-base-s4d", "–")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must contain a JSON object"),
        ("{}", "key 'name' is missing"),
        (json.dumps(result(epochs="40")), "'epochs' cannot be \"40\""),
        (json.dumps(result(best_on_test={"epoch": 3})), "'best_on_test' must have numbers 'epoch' and 'accuracy'; got"),
        (json.dumps(result(test=62.0)), "'accuracy' of test must be from 0 to 1; got 62.0"),
        (json.dumps(result(test=float("nan"))), "'accuracy' of test must be from 0 to 1; got NaN"),
    ],
)
def test_bad_files_are_named(tmp_path, text, message):
    record(tmp_path / "good", result())
    record(tmp_path / "bad", None)
    (tmp_path / "bad" / "result.json").write_text(text)
    with pytest.raises(ValueError, match=r"bad.result\.json") as error:
        collect([tmp_path])
    assert message in str(error.value)


def test_markdown_has_every_column_of_every_line():
    runs = [result(), result(name="my|run")]
    lines = report.markdown(runs).splitlines()
    assert len(lines) == 4
    assert {line.replace("\\|", "").count("|") for line in lines} == {len(report.COLUMNS) + 1}
    assert "| listops-base | listops | 0 | 62.00 | 62.00 | 62.40 | −0.40 | MEGA 63.14 | 331,786 |" in lines[2]


def call(*argv):
    parser = Parser(prog="mrconv")
    command.add(parser.add_subparsers())
    given = parser.parse_args(["results", *map(str, argv)])
    given.run(given)


def test_the_command_searches_results_and_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match="no results or runs folder here"):
        call()
    (tmp_path / "runs").mkdir()
    with pytest.raises(CommandError, match=r"no result\.json under runs"):
        call()
    record(tmp_path / "runs" / "a", result())
    call("--markdown", tmp_path / "docs" / "report.md")
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:2] == ["run", "seeds"]
    assert out[1].startswith("listops-base  0")
    assert (tmp_path / "docs" / "report.md").read_text() == report.markdown([result()])


def test_the_command_reports_what_is_wrong(tmp_path):
    with pytest.raises(CommandError, match=r"no such file or folder: .*nowhere"):
        call(tmp_path / "nowhere")
    record(tmp_path / "runs", result())
    with pytest.raises(CommandError, match="argument --markdown: cannot write"):
        call(tmp_path, "--markdown", "/dev/null/report.md")


def test_baselines_are_compared_with_the_paper(tmp_path):
    line = only_line([result(name="listops-s4", epochs=40)])
    assert (line["paper"], line["difference"], line["notes"]) == ("59.60", "+2.40", "–")
    runs = [result(name="listops-s4"), result(name="listops-base"), result(name="listops-large", partial=True)]
    record(tmp_path / "runs" / "a", runs[0])
    record(tmp_path / "runs" / "b", runs[1])
    record(tmp_path / "runs" / "c", runs[2])
    call(tmp_path / "runs", "--baselines", tmp_path / "baselines.md")
    table = (tmp_path / "baselines.md").read_text().splitlines()
    here = [line for line in table if ", here" in line]
    assert [line.split(" | ")[:2] for line in here] == [["| S4-LegS, here", "62.00"], ["| MRConv, base, here", "62.00"]]
    assert "| S5 | 62.15 | 89.31 | 91.40 | 88.00 | 95.33 | 98.58 | 90.10 | 96.52 | 94.53 |" in table
    assert "| MRConv, base | 62.40 | 89.26 | 91.44 | 90.37 | 95.55 | 97.82 | 94.26 | 96.82 | 95.05 |" in table
    assert "| MRConv, large | 62.45 | 89.42 | 91.48 | 90.55 | 96.64 | 98.65 | – | – | – |" in table


def test_the_best_baselines_are_among_those_quoted():
    for i, task in enumerate(paper.TASKS):
        name, accuracy = paper.BEST_BASELINES[task]
        column = {model: values[i] for model, (_, values) in paper.BASELINES.items()}
        assert column[name] == accuracy == max(value for value in column.values() if value is not None)
