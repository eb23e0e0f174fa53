"""Helpers of the tests of tasks: files in the layouts that tasks read, and a check of invalid ones."""

import io
import tarfile
import tracemalloc
import zipfile
from contextlib import contextmanager

import pytest

from mrconv.tasks import DataError, task
from mrconv.tasks.pathfinder import CONTOUR_FOLDER


def check_invalid(message, name, folder, **options):
    """Assert that preparing a task raises DataError with this message and leaves no cache."""
    with pytest.raises(DataError, match=message):
        task(name, folder, **options).prepare()
    assert not list((folder / "cache").iterdir())


def write_files(folder, files):
    """Write files, given by relative path and content, into a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def write_tar(path, files, mode="w:gz"):
    """Write files into a tar archive."""
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_zip(path, files):
    """Write files into a zip archive."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def write_deflated(path, files):
    """Write files into a compressed zip archive."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@contextmanager
def most_memory(size):
    """Assert that the block allocates at most this many bytes at a time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= size, f"{peak / 2**20:.0f} MiB"


def truncate(path, size):
    """Keep the first `size` bytes of a file; a negative size counts from the end."""
    path.write_bytes(path.read_bytes()[:size])
    return path


def listops_text(symbols):
    """Return an expression as in LRA's files: nested pairs, such as ( ( ( [MAX 2 ) 9 ) ] )."""
    from mrconv.tasks.generators.listops_expressions import CLOSE, MIN, SYMBOLS

    words = []
    openings = []  # of each open operator: its place in words, and the number of its arguments
    for symbol in symbols.tolist():
        words.append(SYMBOLS[symbol])
        if MIN <= symbol < CLOSE:
            openings.append([len(words) - 1, 0])
            continue
        if symbol == CLOSE:
            words.append(")")
            place, arguments = openings.pop()
            words[place] = "( " * (arguments + 1) + words[place]
        if openings:
            words.append(")")
            openings[-1][1] += 1
    return " ".join(words)


def write_listops(path, expressions, start, stop):
    """Write expressions start .. stop - 1 as a file of LRA: tab-separated Source and Target, lines ended by CR LF."""
    with open(path, "w", encoding="ascii", newline="\r\n") as file:
        file.write("Source\tTarget\n")
        for i in range(start, stop):
            file.write(f"{listops_text(expressions[i])}\t{expressions.targets[i]}\n")


def write_pathfinder(folder, images, labels, per_folder=1000):
    """Write images (n, size, size) in LRA's layout; return the folder that holds imgs/ and metadata/."""
    import PIL.Image

    target = folder / f"pathfinder{images.shape[1]}" / CONTOUR_FOLDER
    (target / "metadata").mkdir(parents=True, exist_ok=True)
    for number, start in enumerate(range(0, len(images), per_folder)):
        inner = f"imgs/{number}"
        (target / inner).mkdir(parents=True, exist_ok=True)
        lines = []
        for i in range(min(per_folder, len(images) - start)):
            PIL.Image.fromarray(images[start + i]).save(target / inner / f"sample_{i}.png")
            lines.append(f"{inner} sample_{i}.png {i} {int(labels[start + i])}\n")
        (target / "metadata" / f"{number}.npy").write_text("".join(lines), encoding="utf-8")
    return target
