"""Training on custom data: names of options, and what is reported about the files."""

from dataclasses import dataclass

import numpy as np
import pytest

from mrconv.tasks import Task, register_task
from mrconv.training import loop
from mrconv.training.composition import compose

from .miniature import small

soundfile = pytest.importorskip("soundfile")


def test_no_task_has_an_option_that_task_rate_would_hide():
    @dataclass(frozen=True)
    class Radio(Task):
        rate: int = 16000

    with pytest.raises(ValueError, match="task radio: an option cannot be called rate"):
        register_task("radio")(Radio)


def test_changes_to_the_files_are_printed_at_the_start_of_a_run(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for i in range(20):
        (tmp_path / "files" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        soundfile.write(tmp_path / "files" / "ab"[i % 2] / f"{i}.wav", rng.normal(0, 0.1, 64), 32000)
    settings = ["task=folder", f"data={tmp_path / 'files'}", f"data_dir={tmp_path}", "accelerator=cpu"]
    result = loop.train(small(compose(settings)), tmp_path / "run")
    line = "resampled from 32,000 to 16,000 samples a second (20 of 20 files)"
    assert capsys.readouterr().out.count(f"folder: {line}\n") == 1
    assert result["data"]["changes"] == line
