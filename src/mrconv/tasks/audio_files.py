"""Recordings as the integers that were recorded."""

from __future__ import annotations

import io

import numpy as np

from .errors import DataError


def read_audio(content: bytes, name: str, rate: int | None = 16000) -> np.ndarray:
    """Return the samples of a WAV or FLAC file, int16 (n,): one channel, 16 bits, at this rate (None: at any)."""
    try:
        import soundfile  # type: ignore[import-untyped]
    except (ImportError, OSError) as error:  # OSError: the package is there, its C library is not
        raise DataError(f"to read {name}, soundfile is needed: pip install 'mrconv[data]'") from error
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
            declared = file.frames if file.format == "FLAC" else _declared(content, file.frames)
            samples: np.ndarray = file.read(dtype="int16")
    except (soundfile.SoundFileError, RuntimeError, ValueError) as error:
        why = getattr(error, "error_string", error)
        raise DataError(f"{name} is no WAV or FLAC file, or is damaged or cut off: {why}") from error
    if len(samples) == 0:
        raise DataError(f"{name} has no samples")
    if len(samples) < declared:
        raise DataError(f"{name} is cut off: it has {len(samples):,} of {declared:,} samples")
    return samples


def _declared(content: bytes, frames: int) -> int:
    """Return how many 16-bit samples a WAV file says it has: of one that is cut off, libsndfile reads what is left."""
    at = 12
    while at + 8 <= len(content):
        size = int.from_bytes(content[at + 4 : at + 8], "little")
        if content[at : at + 4] == b"data":
            return frames if size == 0xFFFFFFFF else size // 2  # that size: written as a stream, its end not known
        at += 8 + size + size % 2
    return frames
