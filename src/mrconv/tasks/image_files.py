"""Pictures, decoded by Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image


def read_image(path: Path, mode: str) -> Image:
    """Return a picture in this mode, "L" for grey or "RGB"; a file that is not there, empty or damaged is named."""
    try:
        import PIL.Image
    except ImportError as error:
        raise DataError(f"to read {path}, Pillow is needed: pip install 'mrconv[data]'") from error
    try:
        with PIL.Image.open(path) as image:
            return image.convert(mode)
    except FileNotFoundError as error:
        raise DataError(f"{path} is not there") from error
    except (OSError, SyntaxError, ValueError, EOFError, PIL.Image.DecompressionBombError) as error:
        why = f"cannot be read: {error}" if path.is_file() and path.stat().st_size else "is empty or no file"
        raise DataError(f"{path} {why}") from error
