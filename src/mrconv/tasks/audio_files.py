"""Decoding of audio files, for training and inference alike: mono 16-bit samples at one sampling rate."""

from __future__ import annotations

import io
import math

import numpy as np

from .._utils.extras import needs
from .errors import DataError
from .reading import check_size, reading

RATE_LIMITS = (1_000, 1_000_000)  # sampling rates of recordings that can be resampled
MARGIN = 1_000  # samples past the end that are decoded too, because the filter of the resampling sees them
UNKNOWN_SIZE = 0x7FFFF000  # programs that write a WAV file to a pipe declare at least this many bytes


def read_audio(content: bytes, name: str, sample_rate: int, length: int | None = None) -> tuple[np.ndarray, list[str]]:
    """Return a recording as int16 (n,), mono and at a sampling rate, with notes on what was changed.

    Channels are averaged, then resampled. A mono 16-bit file at the sampling rate is read exactly.

    Args:
        content: the file, in a format that libsndfile reads.
        name: name of the file, for errors.
        sample_rate: samples a second of the result.
        length: largest number of samples, of which at least so much of the file is decoded; None stands for all.
    """
    try:
        import soundfile  # type: ignore[import-untyped]
    except (ImportError, OSError) as error:  # OSError: the package is installed, its C library is not
        raise DataError(needs(f"reading {name}", "soundfile", "data")) from error
    notes = []
    with (
        reading(f"cannot read {name}; it", "may be damaged or truncated", ""),
        soundfile.SoundFile(io.BytesIO(content)) as file,
    ):
        file_rate, total, low, high = file.samplerate, file.frames, *RATE_LIMITS
        if file_rate != sample_rate and not low <= file_rate <= high:
            raise DataError(f"{name} must have {low:,} to {high:,} samples a second; got {file_rate:,}")
        needed = total if length is None else math.ceil(length / sample_rate * file_rate)
        margin = math.ceil(MARGIN / sample_rate * file_rate)
        frames = min(total, needed + margin)
        check_size(name, 4 * frames * max(file.channels, math.ceil(sample_rate / file_rate)))
        x = file.read(frames, dtype="float32", always_2d=True)
        lossless = file.format in ("WAV", "WAVEX", "FLAC")  # others declare their length approximately
    if len(x) == 0:
        raise DataError(f"{name} has no samples")
    if lossless and (len(x) < min(total, needed) or _lacks_bytes(content)):
        raise DataError(f"{name} is truncated: the file is shorter than its header declares")
    if x.shape[1] > 1:
        notes.append(f"{x.shape[1]} channels were averaged")
    samples = x.mean(1) * 2**15
    if file_rate != sample_rate:
        notes.append(f"resampled from {file_rate:,} to {sample_rate:,} samples a second")
        samples = _resample(samples, file_rate, sample_rate, name)
    if total > needed:
        notes.append(f"only the first {needed / file_rate:.2f} of {total / file_rate:.2f} seconds were used")
    if not np.isfinite(samples).all():
        raise DataError(f"{name} has samples that are not finite")
    return np.rint(samples[:length]).clip(-(2**15), 2**15 - 1).astype(np.int16), notes


def _resample(samples: np.ndarray, file_rate: int, sample_rate: int, name: str) -> np.ndarray:
    try:
        import soxr  # type: ignore[import-untyped]
    except ImportError as error:
        rates = f"{name} has {file_rate:,} samples a second instead of {sample_rate:,}"
        raise DataError(f"{rates}; {needs('resampling', 'soxr', 'data')}") from error
    resampled: np.ndarray = soxr.resample(samples, file_rate, sample_rate)
    return resampled


def _lacks_bytes(content: bytes) -> bool:
    """Return whether a WAV file ends before its samples do; libsndfile reads such a file without error."""
    if content[:4] != b"RIFF":
        return False
    at = 12
    while at + 8 <= len(content):
        size = int.from_bytes(content[at + 4 : at + 8], "little")
        if content[at : at + 4] == b"data":
            return size < UNKNOWN_SIZE and at + 8 + size > len(content)
        at += 8 + size + size % 2
    return False
