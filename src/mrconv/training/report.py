"""Tables of recorded results beside the paper's, averaged over seeds, with notes on settings that differ."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._utils.duration import format_duration
from .paper_numbers import (
    BASELINES,
    CLASSES,
    EXAMPLES,
    TASKS,
    mrconv_accuracies,
    on_other_classes,
    published_for_run,
)
from .presets import preset_of_run
from .run_names import REPEATS, changed_keys, run_name, setting_texts
from .scores import SCORES, Score
from .tables import NOTHING, aligned_table, markdown_lines, markdown_table

# Keys that reduce a run, with or without a preset, and their notes.
REDUCED = {
    "limit_train": "{} batches an epoch",
    "limit_eval": "{} batches evaluated",
    "rate": "trained at rate {:g}",
}
MOST = 4  # changed keys that a note lists
GENERATED = "generated data"

COLUMNS = {
    "run": "run",
    "task": "task",
    "seeds": "seeds",
    "test": "test, %",
    "merged": "merged, %",
    "paper": "paper, %",
    "difference": "difference",
    "baseline": "best baseline in the paper",
    "parameters": "parameters",
    "epochs": "epochs",
    "time": "time per run",
    "hardware": "hardware",
    "revision": "revision",
    "notes": "notes",
}
LEFT = ("run", "task", "seeds", "baseline", "hardware", "revision", "notes")
NOT_ON_TERMINALS = ("task", "hardware", "revision")


def group_seeds(results: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Group the results of runs that differ only in their seed; a partial run is a group by itself.

    Runs of which the last epoch is recorded do not join earlier ones whose epoch was chosen by test, runs with averaged
    statistics do not join those from before there were any, and runs on generated data or on other classes do not join
    runs on the published data. Any other key that an earlier record lacks has its default.
    """
    groups: list[tuple[Any, list[Mapping[str, Any]]]] = []
    for result in results:
        given = result.get("config", {})
        config = {key: value for key, value in changed_keys(given, {}).items() if key not in REPEATS | {"name"}}
        data = (on_generated_data(result), on_other_classes(result) and result["classes"])
        kind = ("best_on_test" in result, "precise_stats" in given, data)
        settings = (displayed_name(result), result["task"], config, kind)
        for other, group in groups:
            separate = result["partial"] or group[0]["partial"] or result["seed"] in [each["seed"] for each in group]
            if other == settings and not separate:
                group.append(result)
                break
        else:
            groups.append((settings, [result]))
    return [group for _, group in groups]


def displayed_name(result: Mapping[str, Any]) -> str:
    """Return a run's name with the settings that differ from its preset, even if the record has the preset's name."""
    return run_name(result.get("config", {}) | {"name": result["name"], "task": result["task"]})


def lines(results: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the cells of each line of a table, by column; runs that the paper reports come first."""
    return [
        _line(group) for group in sorted(group_seeds(results), key=lambda group: published_for_run(group[0]) is None)
    ]


def _line(group: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    first = group[0]
    metric = SCORES[first.get("metric", "accuracy")]
    test, merged = _scores(group), _scores(group, "merged_")
    paper = published_for_run(first)
    cells = dict.fromkeys(COLUMNS, NOTHING) | {
        "run": displayed_name(first),
        "task": first["task"],
        "seeds": ", ".join(str(result["seed"]) for result in group),
        "test": mean_and_deviation(test, _unit(metric)),
        "merged": mean_and_deviation(merged, _unit(metric)),
        "parameters": " or ".join(dict.fromkeys(f"{result['parameters']:,}" for result in group)),
        "epochs": _epochs(first),
        "time": " to ".join(dict.fromkeys(duration(f([r["seconds"] for r in group])) for f in (min, max))),
        "hardware": _environment(group, "hardware"),
        "revision": _environment(group, "revision"),
        "notes": "; ".join(notes(*group)) or NOTHING,
    }
    if paper is not None:
        cells["paper"] = "chance" if paper.accuracy is None else f"{paper.accuracy:.2f}"
        cells["baseline"] = f"{paper.baseline} {paper.baseline_accuracy:.2f}"
        if test and paper.accuracy is not None and as_published(first):
            cells["difference"] = f"{statistics.mean(test) - paper.accuracy:+.2f}".replace("-", "−")
    return cells


def _split(result: Mapping[str, Any]) -> str:
    """Return the split to report: test, or validation where there is no test split."""
    scores = result[result.get("metric", "accuracy")]
    return "val" if "val" in scores and "test" not in scores else "test"


def _scores(group: Sequence[Mapping[str, Any]], prefix: str = "") -> list[float]:
    """Return the scores of the runs, accuracies in percent."""
    metric, split = SCORES[group[0].get("metric", "accuracy")], _split(group[0])
    key = prefix + metric.name
    return [metric.scale * result[key][split] for result in group if split in result[key]]


def _unit(metric: Score) -> str:
    return "" if metric.name == "accuracy" else f" {metric.name}"


def mean_and_deviation(values: Sequence[float], unit: str = "") -> str:
    """Return the mean and, for several values, the sample standard deviation; values without a unit are percent."""
    if not values:
        return NOTHING
    digits = 3 if unit else 2
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}{unit}"


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds, or a dash."""
    return format_duration(seconds) if math.isfinite(seconds) else NOTHING


def _epochs(result: Mapping[str, Any]) -> str:
    if not result["partial"]:
        return str(result["epochs"])
    done = result.get("epochs_done")
    return f"{'?' if done is None else done} of {result['epochs']}"


def _environment(group: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return the values of an environment key in a group; revisions are cut to 10 digits."""
    values = dict.fromkeys(result["environment"].get(key) or NOTHING for result in group)
    if key == "revision":
        values = dict.fromkeys(text[:10] + "+" * (len(text) > 10 and text.endswith("+")) for text in values)
    return ", ".join(values)


def notes(*group: Mapping[str, Any]) -> list[str]:
    """Return the caveats of comparing a run, or runs that differ in their seed, with the paper."""
    result = group[0]
    texts, changed = ["partial"] if result["partial"] else [], changes(result)
    texts += [f"init={changed.pop('init')}"] if "init" in changed else []
    texts += [text.format(changed.pop(key)) for key, text in REDUCED.items() if key in changed]
    if "epochs" in changed:
        texts.append(f"{changed.pop('epochs')} epochs instead of {_preset_values(result)['epochs']}")
    if changed:
        settings = setting_texts(changed)
        more = f" and {len(settings) - MOST} more" if len(settings) > MOST else ""
        texts.append(", ".join(settings[:MOST]) + more)
    task, examples = result["task"], result.get("examples", {}).get("train")
    printed = EXAMPLES.get(task) if published_for_run(result) is not None else None
    if printed is not None and examples is not None and examples != printed:
        texts.append(f"{examples:,} training examples, {printed:,} in the paper")
    if on_other_classes(result):
        texts.append(f"{result['classes']:,} classes, {CLASSES[task]:,} in the paper")
    if on_generated_data(result):
        texts.append(GENERATED)
    if result.get("watched", "").startswith("test/"):  # codespell:ignore watched
        texts.append(_epoch_note(group))
    if _split(result) == "val":
        texts.append("validation")
    texts += _evaluation_notes(group)
    texts += dict.fromkeys(f"{each['used']} instead of {each['instead_of']}" for each in _substitutions(group))
    return texts


def _evaluation_notes(group: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the scores of evaluations with other settings that all runs of a group have."""
    metric, split = SCORES[group[0].get("metric", "accuracy")], _split(group[0])
    evaluations = [result.get("evaluations", {}) for result in group]
    texts = []
    for settings in evaluations[0]:
        scores = [metric.scale * each[settings][split] for each in evaluations if split in each.get(settings, ())]
        if len(scores) == len(group):
            texts.append(f"{settings}: {mean_and_deviation(scores, _unit(metric))}")
    return texts


def _substitutions(group: Sequence[Mapping[str, Any]]) -> list[Mapping[str, str]]:
    """Return which checkpoints were recorded in place of the best weights, which could not be read."""
    return [result["substitution"] for result in group if "substitution" in result]


def on_generated_data(result: Mapping[str, Any]) -> bool:
    """Return whether a run's examples were generated, so that its test split is not the paper's."""
    return bool(result.get("data", {}).get("source") == "generated")


def _epoch_note(group: Sequence[Mapping[str, Any]]) -> str:
    """Return which epoch is recorded of runs without a validation split."""
    if "best_on_test" not in group[0]:  # recorded by an earlier version
        return "epoch chosen by test"
    best, metric = [result["best_on_test"] for result in group], SCORES[group[0].get("metric", "accuracy")]
    score = mean_and_deviation([metric.scale * each[metric.name] for each in best], _unit(metric))
    return f"last epoch; best on test {score} at epoch {', '.join(str(each['epoch']) for each in best)}"


def changes(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the preset; without a preset, limits and `init` only."""
    preset = _preset_values(result)
    changed = changed_keys(result.get("config", {}), preset)
    ignored = REPEATS | {"name"}
    return {key: z for key, z in changed.items() if key not in ignored and (preset or key in REDUCED or key == "init")}


def _preset_values(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the preset that a run starts from; {} if there is none."""
    preset = preset_of_run(result["name"], result["task"])
    return preset.values() if preset else {}


def as_published(result: Mapping[str, Any]) -> bool:
    """Return whether a run is complete, with its preset's values and the paper's classes, so that both compare."""
    return not result["partial"] and not changes(result) and not on_other_classes(result)


def table(results: Iterable[Mapping[str, Any]]) -> str:
    """Return an aligned table for a terminal."""
    shown = {key: heading for key, heading in COLUMNS.items() if key not in NOT_ON_TERMINALS}
    return aligned_table(shown, lines(results), LEFT)


def markdown(results: Iterable[Mapping[str, Any]]) -> str:
    """Return a table in Markdown, with all columns."""
    return markdown_table(COLUMNS, lines(results), LEFT)


def baseline_table(results: Iterable[Mapping[str, Any]]) -> str:
    """Return the paper's accuracies of all models by task in Markdown, each with our runs in the line below it.

    Runs of MRConv are those of TASK-base and TASK-large, runs of a baseline those of TASK-MIXER. Only complete runs
    with their preset's values count; several are averaged. A score on generated data says so.
    """
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        if as_published(result):
            runs.setdefault(displayed_name(result), []).append(result)
    models = BASELINES | {f"MRConv, {size}": (size, mrconv_accuracies(size)) for size in ("base", "large")}
    cells = [["model", *TASKS], [":---", *("---:" for _ in TASKS)]]
    for name, (suffix, accuracies) in models.items():
        cells.append([name, *(NOTHING if value is None else f"{value:.2f}" for value in accuracies)])
        groups = [runs.get(f"{task}-{suffix}") for task in TASKS]
        if any(groups):
            cells.append([f"{name}, here", *(_mean_of_runs(each) if each else NOTHING for each in groups)])
    return markdown_lines(cells)


def _mean_of_runs(runs: Sequence[Mapping[str, Any]]) -> str:
    return mean_and_deviation(_scores(runs)) + f" ({GENERATED})" * any(map(on_generated_data, runs))
