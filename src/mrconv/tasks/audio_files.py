"""Decoding of audio files: exact 16-bit samples for training, any recording resampled for inference."""

from __future__ import annotations

import io
import math

import numpy as np

from .errors import DataError

RATE_LIMITS = (1_000, 1_000_000)  # sampling rates of recordings that can be resampled


def read_audio(content: bytes, name: str, rate: int | None = 16000) -> np.ndarray:
    """Return the samples of a mono 16-bit WAV or FLAC file, int16 (n,); `rate` None accepts any sampling rate."""
    try:
        import soundfile  # type: ignore[import-untyped]
    except (ImportError, OSError) as error:  # OSError: the package is installed, its C library is not
        raise DataError(f"reading {name} requires soundfile: pip install 'mrconv[data]'") from error
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            if file.format not in ("WAV", "WAVEX", "FLAC"):
                raise DataError(f"{name} is {file.format} audio; expected WAV or FLAC")
            if file.channels != 1:
                raise DataError(f"{name} has {file.channels} channels; expected one")
            if rate is not None and file.samplerate != rate:
                raise DataError(f"{name} has {file.samplerate:,} samples a second; expected {rate:,}")
            if file.subtype != "PCM_16":
                raise DataError(f"{name} has samples of type {file.subtype}; expected PCM_16 (16 bits, signed)")
            declared = file.frames if file.format == "FLAC" else _declared_samples(content, file.frames)
            samples: np.ndarray = file.read(dtype="int16")
    except (soundfile.SoundFileError, RuntimeError, ValueError) as error:
        reason = getattr(error, "error_string", error)
        raise DataError(f"{name} is not a WAV or FLAC file, or is damaged or truncated: {reason}") from error
    if len(samples) == 0:
        raise DataError(f"{name} has no samples")
    if len(samples) < declared:
        raise DataError(f"{name} is truncated: it has {len(samples):,} of {declared:,} samples")
    return samples


def _declared_samples(content: bytes, frames: int) -> int:
    """Return the number of 16-bit samples in a WAV file's header; libsndfile reads a truncated file without error."""
    at = 12
    while at + 8 <= len(content):
        size = int.from_bytes(content[at + 4 : at + 8], "little")
        if content[at : at + 4] == b"data":
            return frames if size == 0xFFFFFFFF else size // 2  # 0xFFFFFFFF: written as a stream of unknown length
        at += 8 + size + size % 2
    return frames


def resample_audio(content: bytes, rate: int, length: int) -> tuple[np.ndarray, list[str]]:
    """Return up to about `length` samples of a recording, mono, at a sampling rate and on the scale of 16-bit integers.

    Also return notes on what was changed. Only the part that is needed is decoded.
    """
    try:
        import soundfile
        import soxr  # type: ignore[import-untyped]
    except (ImportError, OSError) as error:
        raise DataError("reading recordings requires soundfile and soxr: pip install 'mrconv[serve]'") from error
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            file_rate, seconds = file.samplerate, file.frames / file.samplerate
            if file_rate != rate and not RATE_LIMITS[0] <= file_rate <= RATE_LIMITS[1]:
                low, high = RATE_LIMITS
                raise DataError(f"a recording has {low:,} to {high:,} samples a second; got {file_rate:,}")
            frames = math.ceil(length / rate * file_rate)
            x = file.read(frames, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError, ValueError) as error:
        reason = getattr(error, "error_string", error)
        raise DataError(f"cannot read the recording; it may be damaged or truncated: {reason}") from error
    if len(x) == 0:
        raise DataError("the recording has no samples")
    notes = []
    if x.shape[1] > 1:
        notes.append(f"{x.shape[1]} channels were averaged")
    samples = x.mean(1) * 2**15  # the scale of int16
    if file_rate != rate:
        notes.append(f"resampled from {file_rate:,} to {rate:,} samples a second")
        samples = soxr.resample(samples, file_rate, rate)
    if seconds > frames / file_rate:
        notes.append(f"only the first {frames / file_rate:.2f} of {seconds:.2f} seconds were used")
    return samples, notes
