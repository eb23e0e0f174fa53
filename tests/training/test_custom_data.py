"""Training on custom data: names of options, what is reported about the files, masked padding."""

from dataclasses import dataclass

import numpy as np
import pytest

from mrconv.tasks import Task, register_task
from mrconv.tasks.preprocessing import Preprocessor
from mrconv.training import loop, rundir
from mrconv.training.composition import compose
from mrconv.training.datamodule import prepare
from mrconv.training.figures import draw_run
from mrconv.training.module import build_model

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


def test_inputs_are_described_in_ascii_before_training(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("text,label\n" + "é😀,ja\nx,nein\n" * 20, encoding="utf-8")
    settings = ["task=folder", f"data={tmp_path / 'a.csv'}", f"data_dir={tmp_path}", "accelerator=cpu"]
    monkeypatch.setattr("pytorch_lightning.Trainer.fit", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(pytest.fail.Exception, match="trained"):
        loop.train(small(compose(settings)), tmp_path / "run", quiet=True)
    inputs = (tmp_path / "run" / "model" / "inputs.json").read_bytes()
    assert inputs.isascii()
    assert Preprocessor.from_json(inputs.decode()).vocabulary[-2:] == ("é", "😀")
    with pytest.raises(ValueError, match=r"is not a run folder: it has neither metrics\.csv nor model/"):
        draw_run(tmp_path / "run")

    def fails(_):
        raise OSError("disk full")

    monkeypatch.setattr(Preprocessor, "to_json", fails)
    with pytest.raises(OSError, match="disk full"):
        loop.train(small(compose(settings)), tmp_path / "other", quiet=True)


def test_padding_of_custom_texts_is_masked_and_that_of_other_tasks_is_not(tmp_path):
    for i, split in enumerate(("train", "test")):
        lines = "".join(f"{'a' * n},x\n{'b' * (40 - n)},y\n" for n in range(1 + i, 30))
        (tmp_path / f"{split}.csv").write_text(f"text,label\n{lines}")
    custom = ["task=folder", f"data={tmp_path}", f"cache_dir={tmp_path / 'cache'}"]
    model = build_model(small(compose(custom)), data := prepare(compose(custom)))
    assert model.config.mask_padding
    assert not build_model(small(compose([*custom, "mask_padding=false"])), data).config.mask_padding
    assert not build_model(small(compose(["task=listops"])), data).config.mask_padding
    assert compose(custom).name == compose([*custom, "mask_padding=true"]).name == tmp_path.name


def test_a_run_without_masking_resumes_by_its_settings_only(tmp_path):
    rundir.write_config(tmp_path / "config.yaml", vars(compose(["task=folder", "mask_padding=false", "name=run"])))
    rundir.check_same_experiment(compose(["task=folder", "mask_padding=false", "name=run"]), tmp_path)
    with pytest.raises(ValueError, match="mask_padding is False there and True here"):
        rundir.check_same_experiment(compose(["task=folder", "name=run"]), tmp_path)
    rundir.write_config(tmp_path / "config.yaml", vars(compose(["task=listops", "mask_padding=false", "name=run"])))
    rundir.check_same_experiment(compose(["task=listops", "name=run"]), tmp_path)
