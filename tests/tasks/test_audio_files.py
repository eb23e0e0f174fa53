"""Audio files: exact samples, averaged channels, resampling, the part that is decoded, and errors."""

import io
import sys

import numpy as np
import pytest

from mrconv.tasks import DataError
from mrconv.tasks.audio_files import read_audio
from mrconv.tasks.preprocessing import Preprocessor

soundfile = pytest.importorskip("soundfile")


def audio(samples, form="WAV", rate=16_000, subtype="PCM_16"):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, subtype, format=form)
    return file.getvalue()


def noise(length=16_000, seed=0):
    return np.random.default_rng(seed).integers(-3000, 3000, length).astype(np.int16)


def tone(rate, seconds=1.0):
    return (8000 * np.sin(2 * np.pi * 300 * np.arange(round(rate * seconds)) / rate)).astype(np.int16)


@pytest.mark.parametrize("form", ["WAV", "WAVEX", "FLAC"])
def test_mono_16_bit_audio_is_read_exactly_and_truncated_audio_raises(form):
    content = audio(noise(), form)
    samples, notes = read_audio(content, "a", 16_000)
    assert (samples.dtype, notes) == (np.int16, [])
    assert (samples == noise()).all()
    for size in (len(content) // 2, len(content) - 2, 30, 0):
        with pytest.raises(DataError, match=r"a.*truncated"):
            read_audio(content[:size], "a", 16_000)


@pytest.mark.parametrize("subtype", ["PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
def test_other_types_of_samples_are_rounded_to_16_bits(subtype):
    content = audio(noise() / 2**15, subtype=subtype)
    assert (read_audio(content, "a", 16_000)[0] == noise()).all()
    with pytest.raises(DataError, match="a is truncated"):
        read_audio(content[:-2], "a", 16_000)


def test_channels_are_averaged():
    samples, notes = read_audio(audio(np.stack([noise(), -noise() + 6], 1)), "a", 16_000)
    assert (samples == 3).all()
    assert notes == ["2 channels were averaged"]


@pytest.mark.parametrize("file_rate", [8_000, 11_025, 44_100])
def test_recordings_are_resampled(file_rate):
    pytest.importorskip("soxr")
    samples, notes = read_audio(audio(tone(file_rate), rate=file_rate), "a", 16_000)
    assert len(samples) == 16_000
    assert np.abs(samples[500:-500] - tone(16_000)[500:-500].astype(int)).max() < 20
    assert notes == [f"resampled from {file_rate:,} to 16,000 samples a second"]


@pytest.mark.parametrize("file_rate", [8_000, 16_000, 44_100])
def test_a_part_is_decoded_as_in_the_whole_recording(file_rate):
    pytest.importorskip("soxr")
    content = audio(noise(2 * file_rate), rate=file_rate)
    part, notes = read_audio(content, "a", 16_000, length=4_000)
    assert np.abs(part - read_audio(content, "a", 16_000)[0][:4_000].astype(int)).max() <= 1
    assert notes[-1] == "only the first 0.25 of 2.00 seconds were used"


def test_loud_samples_are_clipped():
    assert read_audio(audio(np.array([2.0, -2.0, 1.0]), subtype="FLOAT"), "a", 16_000)[0].tolist() == [
        2**15 - 1, -(2**15), 2**15 - 1
    ]  # fmt: skip


def test_a_wav_file_written_to_a_pipe_has_no_declared_size():
    content = bytearray(audio(noise()))
    content[40:44] = (0xFFFFFFFF).to_bytes(4, "little")
    assert (read_audio(bytes(content), "a", 16_000)[0] == noise()).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (audio(noise()[:0]), "a has no samples"),
        (b"RIFF", "cannot read a; it may be damaged"),
        (audio(np.array([0, np.nan]), subtype="FLOAT"), "a has samples that are not finite"),
    ],
    ids=["empty", "header", "nan"],
)
def test_unreadable_audio_raises(content, message):
    with pytest.raises(DataError, match=message):
        read_audio(content, "a", 16_000)


@pytest.mark.parametrize("rate", [1, 999, 1_000_001, 2**31 - 1])
def test_absurd_sampling_rate_raises(rate):
    content = audio(np.zeros(9, np.int16), rate=rate)
    with pytest.raises(DataError, match=f"must have 1,000 to 1,000,000 samples a second; got {rate:,}"):
        Preprocessor("audio", 8, ("a",), sample_rate=16000).from_audio(content)
    assert Preprocessor("audio", 9, ("a",), sample_rate=rate).from_audio(content).notes == []


def test_without_soxr_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "soxr", None)
    assert len(read_audio(audio(noise()), "a", 16_000)[0]) == 16_000
    with pytest.raises(DataError, match=r"a has 16,000 samples a second instead of 8,000; .*extra 'data'"):
        read_audio(audio(noise()), "a", 8_000)
