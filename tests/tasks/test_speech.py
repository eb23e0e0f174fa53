"""Speech Commands in miniature: the release as archive and as folder, and three archives."""

import io

import numpy as np
import pytest

from mrconv.tasks import DataError, MissingData, task

from .data_files import truncate, write_files, write_tar, write_zip

soundfile = pytest.importorskip("soundfile")
RELEASE = "speech_commands_v0.02"
WORDS = ("cat", "bed", "happy")


def audio(samples, form="WAV", rate=16_000, subtype="PCM_16"):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, subtype, format=form)
    return file.getvalue()


def clip(seed, length=16_000):
    return np.random.default_rng(seed).integers(-3000, 3000, length).astype(np.int16)


def release(words=WORDS, per_word=4, suffix="wav"):
    """Return the files of a release: the first clip of each word is for validation, the second for test."""
    files = {"README.md": b"hello", "_background_noise_/noise.wav": b"not to be read"}
    for w, word in enumerate(words):
        for i in range(per_word):
            files[f"{word}/{i}_nohash_0.{suffix}"] = audio(clip(100 * w + i), suffix.upper())
    files["validation_list.txt"] = "".join(f"{word}/0_nohash_0.wav\n" for word in words).encode()
    files["testing_list.txt"] = "".join(f"{word}/1_nohash_0.wav\n" for word in words).encode()
    return files


def as_folder(root, files):
    write_files(root / RELEASE, files)
    return root


def as_archive(root, files):
    write_tar(root / f"{RELEASE}.tar.gz", {f"./{name}": content for name, content in files.items()})
    return root


def lists_first(files):
    return dict(sorted(files.items(), key=lambda item: not item[0].endswith(".txt")))


@pytest.mark.parametrize("suffix", ["wav", "flac"])
@pytest.mark.parametrize(
    "write",
    [as_folder, as_archive, lambda root, files: as_archive(root, lists_first(files))],
    ids=["folder", "tar", "lists first"],
)
def test_lists_determine_the_splits(tmp_path, write, suffix):
    data = task("speech", write(tmp_path, release(suffix=suffix))).prepare()
    assert data.classes == ("bed", "cat", "happy")
    assert {name: split.y.tolist() for name, split in data.splits.items()} == {
        "train": [0, 0, 1, 1, 2, 2],
        "val": [0, 1, 2],
        "test": [0, 1, 2],
    }
    assert data.splits["val"].x.dtype == np.int16
    for i, seed in enumerate((100, 0, 200)):  # bed, cat, happy
        assert (data.splits["val"].x[i, :, 0] == clip(seed)).all()
        assert (data.splits["test"].x[i, :, 0] == clip(seed + 1)).all()
        assert (data.splits["train"].x[2 * i + 1, :, 0] == clip(seed + 3)).all()


def test_three_archives_are_the_splits(tmp_path):
    for s, split in enumerate(("train", "val", "test")):
        write_zip(tmp_path / f"{split}.zip", {f"{word}/0.flac": audio(clip(s), "FLAC") for word in WORDS})
    data = task("speech", tmp_path).prepare()
    for s, split in enumerate(("train", "val", "test")):
        assert data.splits[split].y.tolist() == [0, 1, 2]
        assert (data.splits[split].x == clip(s)[:, None]).all()
    (tmp_path / "val.zip").unlink()
    with pytest.raises(MissingData, match=r"train\.zip exists, but val\.zip beside it does not"):
        task("speech", tmp_path).prepare()


def test_clips_in_several_blocks(tmp_path, monkeypatch):
    from mrconv.tasks import speech

    one_block = task("speech", as_archive(tmp_path, release()), cache_dir=tmp_path / "a").prepare()
    monkeypatch.setattr(speech, "BLOCK", 5)
    several = task("speech", tmp_path, cache_dir=tmp_path / "b").prepare()
    assert all((one_block.splits[name].x == several.splits[name].x).all() for name in one_block.splits)
    np.testing.assert_allclose(one_block.scale, several.scale, rtol=1e-6)


def test_shorter_clips_are_padded_with_zeros(tmp_path):
    data = task("speech", as_archive(tmp_path, release() | {"bed/3_nohash_0.wav": audio(clip(7, 9_000))})).prepare()
    samples = data.splits["train"].x[1, :, 0]
    assert (samples[:9_000] == clip(7, 9_000)).all()
    assert not samples[9_000:].any()
    assert data.facts["padded"] == 1


def test_s4_normalisation_of_each_instant(tmp_path):
    data = task("speech", as_archive(tmp_path, release(per_word=6))).prepare()
    train = np.asarray(data.splits["train"].x, np.float64) / 2**30
    expected = (train - train.mean(0)) / (train.std(0, ddof=1) + 1e-5)
    assert data.scale.shape == data.shift.shape == (16_000, 1)
    np.testing.assert_allclose(data.splits["train"].x * data.scale + data.shift, expected, rtol=1e-4, atol=1e-7)


def test_unit_normalisation_is_from_minus_one_to_one(tmp_path):
    data = task("speech", as_archive(tmp_path, release()), normalise="unit").prepare()
    assert (-32768 * data.scale + data.shift, 32767 * data.scale) == (-1, pytest.approx(1, abs=1e-4))


def test_ten_words_are_split_by_word_without_shorter_clips(tmp_path):
    from mrconv.tasks.speech import TEN_WORDS

    files = release((*TEN_WORDS, "bed"), per_word=11) | {"yes/10_nohash_0.wav": audio(clip(1, 8_000))}
    del files["validation_list.txt"], files["testing_list.txt"]
    data = task("speech", as_folder(tmp_path, files), words=10).prepare()
    assert data.classes == TEN_WORDS
    assert data.facts["left_out"] == 1
    counts = {name: np.bincount(split.y).tolist() for name, split in data.splits.items()}
    assert counts == {"train": [8, *[9] * 9], "val": [1] * 10, "test": [1] * 10}
    clips = [x.tobytes() for split in data.splits.values() for x in split.x]
    assert len(set(clips)) == len(clips) == 109


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bed/2_nohash_0.wav": audio(clip(0, 16_001))}, r"bed/2_nohash_0\.wav has 16,001 samples; expected at most"),
        (
            {"bed/2_nohash_0.wav": audio(clip(0), rate=8_000)},
            r"bed/2_nohash_0\.wav is not a mono clip at 16,000 samples a second",
        ),
        ({"bed/2_nohash_0.wav": b""}, r"cannot read .*bed/2_nohash_0\.wav"),
        ({"validation_list.txt": None}, r"has no validation_list\.txt"),
        ({"validation_list.txt": None, "testing_list.txt": None}, r"no validation_list\.txt and no testing_list\.txt"),
        ({"testing_list.txt": b"bed/1_nohash_0.wav\nbed\n"}, r"testing_list\.txt line 2: expected word/clip\.wav"),
        ({"testing_list.txt": b"bed/0_nohash_0.wav\n"}, r"line 2: bed/0_nohash_0\.wav is also in the other list"),
        ({"testing_list.txt": b"\xff\xfe"}, r"testing_list\.txt is not UTF-8"),
        ({"testing_list.txt": b""}, "the test split has no example"),
        ({"stray.wav": audio(clip(0))}, r"stray\.wav is not in a folder"),
        ({"dog/notes.txt": b"no clip"}, "has no training clip of dog"),
    ],
)
def test_invalid_release_raises(tmp_path, change, message):
    files = {name: content for name, content in (release() | change).items() if content is not None}
    with pytest.raises(DataError, match=message):
        task("speech", as_folder(tmp_path, files)).prepare()


def test_word_without_training_clips_raises(tmp_path):
    files = release()
    files["testing_list.txt"] += b"bed/2_nohash_0.wav\nbed/3_nohash_0.wav\n"
    with pytest.raises(DataError, match="no training clip of bed"):
        task("speech", as_archive(tmp_path, files)).prepare()
    with pytest.raises(DataError, match="no training clip of down, go, left, no"):
        task("speech", tmp_path, words=10).prepare()


def test_truncated_archive_raises(tmp_path):
    path = as_archive(tmp_path, release()) / f"{RELEASE}.tar.gz"
    truncate(path, path.stat().st_size * 3 // 7)  # within a clip
    with pytest.raises(DataError, match="truncated"):
        task("speech", tmp_path).prepare()


def test_folder_without_clips_raises(tmp_path):
    files = {name: content for name, content in release().items() if not name.endswith(".wav")}
    with pytest.raises(DataError, match="has no clips"):
        task("speech", as_folder(tmp_path, files)).prepare()


def test_missing_files_raise(tmp_path):
    with pytest.raises(MissingData, match=r"speech_commands_v0\.02\.tar\.gz.*download\.tensorflow\.org"):
        task("speech", tmp_path).prepare()
