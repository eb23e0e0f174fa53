"""Runs packed for another machine: they resume there bit for bit, and damaged parts are rejected."""

import json
import shutil

import pytest
import torch
from pytorch_lightning.callbacks import Callback

from mrconv.cli import main
from mrconv.training import loop, packed_run, rundir
from mrconv.training.trainer import make_trainer

from .miniature import listops

pytestmark = pytest.mark.usefixtures("without_figures")


def train(folder, data_dir, **changes):
    experiment = listops(epochs=3, kernel="fourier+sparse", data_dir=str(data_dir), **changes)
    return loop.train(experiment, folder, quiet=True)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Return the folder of a run that stopped after the first of three epochs."""
    folder = tmp_path_factory.mktemp("packed") / "here" / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw_run", lambda *_, **__: None)
        train(folder, folder.parent / "data", stop_after=1)
    return folder


def final_weights(folder):
    return torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]


def test_an_unpacked_run_resumes_bit_for_bit(started, tmp_path, capsys):
    packed, there = tmp_path / "packed", tmp_path / "there"
    assert main(["run", "pack", str(started), str(packed), "--max-file", "10KiB"]) == 0
    parts = sorted(packed.glob("part-*"))
    assert len(parts) > 3
    assert all(path.stat().st_size <= 10 * 2**10 for path in parts)
    assert f"run at step 4, {sum(path.stat().st_size for path in parts) / 2**20:.1f} MiB" in capsys.readouterr().out
    assert main(["run", "unpack", str(packed), str(there)]) == 0
    assert capsys.readouterr().out.startswith(f"{there}: at step 4;")
    resumed = train(there, tmp_path / "data")
    train(tmp_path / "uninterrupted", tmp_path / "data")
    expected = final_weights(tmp_path / "uninterrupted")
    assert all(torch.equal(value, expected[name]) for name, value in final_weights(there).items())
    assert (there / "metrics.csv").read_text() == (tmp_path / "uninterrupted" / "metrics.csv").read_text()
    assert "rounded_moments_at" not in resumed


def test_a_run_is_packed_while_it_trains(tmp_path, monkeypatch):
    class PackAfterStep6(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 6:
                packed_run.pack(tmp_path / "whole", tmp_path / "packed", 2**30)

    with monkeypatch.context() as patch:
        patch.setattr(
            loop, "make_trainer", lambda given, folder, others: make_trainer(given, folder, [*others, PackAfterStep6()])
        )
        train(tmp_path / "whole", tmp_path / "data")
    there, step = packed_run.unpack(tmp_path / "packed", tmp_path / "there")
    assert step == 4  # the end of the first epoch
    train(there, tmp_path / "data")
    expected = final_weights(tmp_path / "whole")
    assert all(torch.equal(value, expected[name]) for name, value in final_weights(there).items())
    assert (there / "metrics.csv").read_text() == (tmp_path / "whole" / "metrics.csv").read_text()


def test_best_weights_are_those_that_the_last_checkpoint_names(started, tmp_path, monkeypatch):
    """The first links are of two times: training has replaced both checkpoints in between."""
    run, calls, link = tmp_path / "run", [], packed_run.link
    shutil.copytree(started, run)
    content = torch.load(run / "best.ckpt", weights_only=True)
    torch.save({**content, "epoch": 7}, tmp_path / "older.ckpt")
    state = torch.load(run / "last.ckpt", weights_only=True)
    state["global_step"] += 1  # within the second epoch, so that its weights are not the best
    torch.save(state, run / "last.ckpt")

    def link_older_first(source, target):
        calls.append(source.name)
        link(
            tmp_path / "older.ckpt" if calls.count("best.ckpt") == 1 and source.name == "best.ckpt" else source, target
        )

    monkeypatch.setattr(packed_run, "link", link_older_first)
    packed_run.pack(run, tmp_path / "packed", 2**30)
    there, _ = packed_run.unpack(tmp_path / "packed", tmp_path / "there")
    assert (there / "best.ckpt").read_bytes() == (run / "best.ckpt").read_bytes()
    assert calls.count("best.ckpt") == 2


def test_the_previous_checkpoint_is_packed_if_the_last_one_is_damaged(started, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(started, run)
    (run / "last.ckpt").rename(run / "previous.ckpt")
    (run / "last.ckpt").write_bytes(b"half a file")
    with pytest.warns(UserWarning, match=r"run/last.ckpt cannot be read and is not used"):
        packed_run.pack(run, tmp_path / "packed", 2**30)
    assert packed_run.unpack(tmp_path / "packed", tmp_path / "there")[1] == 4


def test_moments_can_be_rounded_and_the_result_records_it(started, tmp_path):
    exact, rounded = (
        packed_run.pack(started, tmp_path / name, 2**30, bfloat16_moments=name == "rounded")
        for name in ("exact", "rounded")
    )
    assert rounded["parts"][0]["bytes"] < exact["parts"][0]["bytes"]
    there, step = packed_run.unpack(tmp_path / "rounded", tmp_path / "there")
    assert step == 4
    state = torch.load(there / "last.ckpt", weights_only=True)["optimizer_states"][0]["state"][0]
    assert {state[name].dtype for name in packed_run.MOMENTS} == {torch.bfloat16}
    assert train(there, tmp_path / "data", stop_after=2)["rounded_moments_at"] == [4]
    state = torch.load(there / "last.ckpt", weights_only=True)["optimizer_states"][0]["state"][0]
    assert {state[name].dtype for name in packed_run.MOMENTS} == {torch.float32}
    assert train(there, tmp_path / "data")["rounded_moments_at"] == [4]


def test_a_run_of_an_ended_schedule_keeps_its_result_and_model(started, tmp_path):
    packed_run.pack(started, tmp_path / "packed", 2**30)
    there, _ = packed_run.unpack(tmp_path / "packed", tmp_path / "there")
    assert rundir.read_result(there) == rundir.read_result(started)
    assert (there / "model" / "model.safetensors").exists()
    assert not (there / "merged").exists()


def test_nothing_is_written_if_a_part_is_missing_or_damaged(started, tmp_path):
    packed, there = tmp_path / "packed", tmp_path / "there"
    packed_run.pack(started, packed, 10 * 2**10)
    part = packed / "part-001"
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"part-001 is damaged: its checksum differs"):
        packed_run.unpack(packed, there)
    part.unlink()
    with pytest.raises(FileNotFoundError, match=r"part-001 is missing"):
        packed_run.unpack(packed, there)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pack", "{here}", "{out}", "--max-file", "16MB"], "must be a size such as 16MiB; got '16MB'"),
        (["pack", "{here}", "{out}", "--max-file", "0"], "must be a size such as 16MiB; got '0'"),
        (["pack", "{tmp}", "{out}"], "is not a run folder: it has no config.yaml"),
        (["pack", "{here}", "{tmp}"], "exists: give a folder that does not"),
        (["unpack", "{tmp}"], "is not a packed run: it has no manifest.json"),
        (["unpack", "{newer}"], "has format 2, this mrconv reads 1"),
    ],
)
def test_errors_are_one_line(started, tmp_path, capsys, arguments, message):
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "manifest.json").write_text(json.dumps({"format": 2}))
    places = {"here": started, "out": tmp_path / "out", "tmp": tmp_path, "newer": tmp_path / "newer"}
    with pytest.raises(SystemExit):
        main(["run", *(word.format(**places) for word in arguments)])
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
