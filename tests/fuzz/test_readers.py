"""Mutated data files: every reader takes them or raises one line, within limits of memory and time."""

import dataclasses
import gzip
import hashlib
import io
import json
import lzma
import pickle
import tarfile

import numpy as np
import pytest
import torch

from mrconv.tasks import packed_data, task
from mrconv.training import Experiment, packed_run, rundir

from ..tasks.data_files import write_deflated, write_tar
from .mutation import Subject, cases, check_cases, write_files

RNG = np.random.default_rng(0)
SUBJECTS = {}
LISTOPS = {"train_size": 9, "val_size": 9, "test_size": 9, "min_length": 5, "max_length": 40, "source": "generate"}


def subject(build):
    """Register a function that returns the files of a subject, how they are read, and further fields."""
    SUBJECTS[build.__name__] = build
    return build


def folder_task(path=".", **options):
    """Return a reader of custom data."""
    options = {"max_file_mib": 16, "val_fraction": 0.2, "test_fraction": 0.2} | options
    return lambda case: task("folder", case, path=str(case / path), cache_dir=case / "cache", **options).prepare()


def named_task(name, **options):
    """Return a reader of the files of a task."""
    return lambda case: task(name, case, **options).prepare()


def saved(save, *arguments, **options):
    """Return what a function writes into a file."""
    save(file := io.BytesIO(), *arguments, **options)
    return file.getvalue()


def wav(form="WAV"):
    soundfile = pytest.importorskip("soundfile")
    return saved(soundfile.write, RNG.integers(-999, 999, 200).astype(np.int16), 16_000, format=form)


def image(form="PNG"):
    pillow = pytest.importorskip("PIL.Image")
    return saved(pillow.fromarray(RNG.integers(0, 255, (8, 8, 3), np.uint8)).save, form)


def xz(content):
    return lzma.compress(content, preset=0)


def media(content, suffix):
    return {f"{name}/{i}.{suffix}": content for name in "ab" for i in range(5)}


def table(separator):
    lines = [
        separator.join(("text", "label")),
        *(separator.join(('"a b"', "yes" if i % 2 else "no")) for i in range(20)),
    ]
    return "\n".join(lines).encode()


def json_lines(label):
    lines = [json.dumps({"text": f"abc\u00e9{i}", "label": label(i)}) for i in range(20)]
    return "\n".join(lines).encode()


def arrays(**options):
    return saved(np.savez, x=RNG.normal(size=(20, 8)), y=np.arange(20) % 2, z=np.ones(3), **options)


@subject
def zip_of_recordings():
    file = io.BytesIO()
    write_deflated(file, media(wav(), "wav"))
    return {"a.zip": file.getvalue()}, folder_task("a.zip")


def tar_of_images():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in media(image(), "png").items():
            info = tarfile.TarInfo(f"{'long' * 40}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


@subject
def tar():
    return {"a.tar": tar_of_images()}, folder_task("a.tar")


@subject
def tar_gz():
    return {"a.tar.gz": gzip.compress(tar_of_images())}, folder_task("a.tar.gz")


@subject
def tar_in_gz():
    return {"a.tar.gz": tar_of_images()}, folder_task("a.tar.gz"), gzip.compress


@subject
def npz():
    return {"a.npz": arrays()}, folder_task("a.npz")


@subject
def npy_in_npz():
    y = saved(np.save, np.arange(20) % 2)

    def wrap(x):
        write_deflated(file := io.BytesIO(), {"x.npy": x, "y.npy": y})
        return file.getvalue()

    return {"a.npz": saved(np.save, RNG.normal(size=(20, 8)))}, folder_task("a.npz"), wrap


@subject
def csv():
    return {"a.csv": table(",")}, folder_task("a.csv")


@subject
def tsv_of_values():
    lines = ["a\tb\tlabel", *(f"{i}\t{i / 7:.3f}\t{i * i:.2e}" for i in range(20))]
    return {"a.tsv": "\n".join(lines).encode()}, folder_task("a.tsv", target="values")


@subject
def jsonl():
    return {"a.jsonl": json_lines(lambda i: i % 3)}, folder_task("a.jsonl")


@subject
def jsonl_of_lists():
    return {"a.jsonl": json_lines(lambda i: ["a", "b"][: i % 3])}, folder_task("a.jsonl", target="labels")


@subject
def jsonl_xz():
    return {"a.jsonl.xz": xz(json_lines(lambda i: i % 2))}, folder_task("a.jsonl.xz")


@subject
def jsonl_in_xz():
    return {"a.jsonl.xz": json_lines(lambda i: i % 2)}, folder_task("a.jsonl.xz"), xz


@subject
def recordings():
    files = media(wav(), "wav") | media(wav("FLAC"), "flac")
    return {f"files/{name}": content for name, content in files.items()}, folder_task("files")


@subject
def images():
    files = media(image(), "png") | media(image("JPEG"), "jpg")
    return {f"files/{name}": content for name, content in files.items()}, folder_task("files")


@subject
def cifar():
    batch = {"data": RNG.integers(0, 256, (4, 3072), np.uint8), "labels": [0, 1, 2, 3]}
    files = {f"data_batch_{i}": pickle.dumps(batch, protocol=3 + i % 2) for i in range(1, 6)}
    files |= {"test_batch": pickle.dumps(batch, 4), "batches.meta": pickle.dumps({"label_names": list("abcdefghij")})}
    return {f"cifar-10-batches-py/{name}": content for name, content in files.items()}, named_task("cifar")


def idx(array):
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


@subject
def mnist():
    images, labels = idx(RNG.integers(0, 256, (20, 28, 28), np.uint8)), idx(np.arange(20, dtype=np.uint8) % 10)
    files = {f"{part}-{kind}": each for part in ("train", "t10k") for kind, each in (
        ("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)
    )}  # fmt: skip
    return files, named_task("smnist")


@subject
def mnist_in_gz():
    files, read = mnist()
    return {f"{name}.gz": content for name, content in files.items()}, read, gzip.compress


@subject
def listops():
    lines = b"Source\tTarget\r\n" + b"( ( ( [MAX 2 ) 9 ) ] )\t9\r\n[SM 1 [MED 3 4 ] ]\t4\r\n" * 9
    return {f"basic_{split}.tsv": lines for split in ("train", "val", "test")}, named_task("listops", source="files")


@subject
def retrieval():
    lines = b'0.0\t1\t2\tb\'a \\xc3\\xa9\'\tb\'b\'\n1\t3\t4\ta\t"b ""c"""\n' * 9
    files = {f"new_aan_pairs.{split}.tsv": lines for split in ("train", "eval", "test")}
    return files, named_task("retrieval", decode=True)


@subject
def reviews():
    lines = b'{"text": "good", "label": 1}\n{"text": "bad", "label": 0}\n' * 9
    return {f"{split}.jsonl": lines for split in ("train", "test")}, named_task("text", min_freq=1)


@subject
def characters_in_xz():
    text = "Ein Text, übersetzt. ".encode() * 40
    read = lambda case: task("characters", case, path=str(case / "a.txt.xz"), length=16).prepare()  # noqa: E731
    return {"a.txt.xz": text}, read, xz


@subject
def pathfinder():
    folder = "pathfinder8/curv_contour_length_14"
    pixels = saved(pytest.importorskip("PIL.Image").fromarray(np.zeros((8, 8), np.uint8)).save, "PNG")
    files = {f"{folder}/imgs/0/{i}.png": pixels for i in range(12)}
    table = saved(np.save, np.array([["imgs/0", f"{i}.png", str(i), str(i % 2)] for i in range(12)]))
    files[f"{folder}/metadata/0.npy"] = table
    return files, named_task("pathfinder", size=8, source="files")


def prepared(tmp_path):
    return task("listops", tmp_path, **LISTOPS).prepare().folder


@subject
def cached_arrays(tmp_path):
    files = {path.name: path.read_bytes() for path in prepared(tmp_path).iterdir()}
    return files, lambda case: task("listops", case, **LISTOPS).load(case)


@subject
def packed_arrays(tmp_path):
    packed_data.pack(task("listops", tmp_path, **LISTOPS), tmp_path / "a.tar.xz")
    content = lzma.decompress((tmp_path / "a.tar.xz").read_bytes())
    read = lambda case: packed_data.unpack(case / "a.tar.xz", case, max_mib=16)  # noqa: E731
    return {"a.tar.xz": content}, read, xz


@subject
def packed_runs(tmp_path):
    rundir.write_config(tmp_path / "config.yaml", dataclasses.asdict(Experiment()))
    state = {"best_epoch": 0, "history": [], "seconds": 1.0, "random": []}
    checkpoint = {"global_step": 1, "epoch": 0, "state_dict": {"a": torch.ones(3)}, "mrconv": state}
    checkpoint["optimizer_states"] = []
    torch.save(checkpoint, tmp_path / "last.ckpt")
    names = ("last.ckpt", "config.yaml")
    write_tar(tmp_path / "part-000", {name: (tmp_path / name).read_bytes() for name in names}, "w")

    def read(case):
        if case.joinpath("manifest.json").read_bytes() == manifest:  # an attacker adapts the checksums
            part = {"sha256": hashlib.sha256((case / "part-000").read_bytes()).hexdigest()}
            described = {"format": 1, "run": "a", "step": 1, "parts": [part]}
            (case / "manifest.json").write_text(json.dumps(described))
        packed_run.unpack(case, case / "run")

    part = {"name": "part-000", "sha256": hashlib.sha256((tmp_path / "part-000").read_bytes()).hexdigest()}
    manifest = json.dumps({"format": 1, "run": "a", "step": 1, "parts": [part]}).encode()
    return {"manifest.json": manifest, "part-000": (tmp_path / "part-000").read_bytes()}, read


def build(name, tmp_path):
    make = SUBJECTS[name]
    (tmp_path / "made").mkdir()
    return Subject(name, *(make(tmp_path / "made") if make.__code__.co_argcount else make()))


@pytest.mark.parametrize("name", SUBJECTS)
def test_valid_files_are_read_and_mutated_ones_are_too_or_are_rejected_in_one_line(name, tmp_path):
    subject = build(name, tmp_path)
    write_files(tmp_path / "case", subject.files, subject.wrap)
    subject.read(tmp_path / "case")
    check_cases(subject, range(2), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_mutated_files_are_read_or_rejected_in_one_line(name, tmp_path):
    check_cases(build(name, tmp_path), cases(len(SUBJECTS)), tmp_path)
