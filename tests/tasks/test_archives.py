"""Reading of folders, tar and zip archives; damaged and malicious archives raise."""

import gzip
import io
import random
import tarfile
import zipfile

import pytest

from mrconv.tasks.archives import checksum, read_members
from mrconv.tasks.errors import DataError
from mrconv.tasks.reading import limited

from .data_files import most_memory, truncate, write_deflated, write_files, write_tar, write_zip

FILES = {"a/1.txt": b"one", "a/2.bin": bytes(5000), "b/3.txt": b"three"}
ZEROS = bytes(24 * 2**20)


@pytest.mark.parametrize("make", [write_tar, write_zip, write_files])
def test_folder_tar_and_zip_give_the_same_files(tmp_path, make):
    name = {write_tar: "x.tar.gz", write_zip: "x.zip", write_files: "x"}[make]
    path = make(tmp_path / name, FILES)
    assert dict(read_members(path)) == FILES
    assert [name for name, _ in read_members(path, lambda name: name.endswith(".txt"))] == ["a/1.txt", "b/3.txt"]


@pytest.mark.parametrize("keep", [0, 30, 60, -40])
def test_truncated_tar_raises(tmp_path, keep):
    write_tar(tmp_path / "cut.tar.gz", {**FILES, "noise": checksum(io.BytesIO(b"")).encode() * 99})
    truncate(tmp_path / "cut.tar.gz", keep)
    with pytest.raises(DataError, match=r"cut\.tar\.gz.* is .*truncated.*download it again"):
        list(read_members(tmp_path / "cut.tar.gz"))


def test_tar_truncated_between_two_members_raises(tmp_path):
    complete = write_tar(tmp_path / "x.tar.gz", {f"{i}.bin": bytes([i]) * 512 for i in range(40)}).read_bytes()
    for keep in range(40, len(complete)):
        (tmp_path / "cut.tar.gz").write_bytes(complete[:keep])
        with pytest.raises(DataError, match="download it again"):
            list(read_members(tmp_path / "cut.tar.gz"))


def test_truncated_zip_raises(tmp_path):
    truncate(write_zip(tmp_path / "cut.zip", FILES), -300)
    with pytest.raises(DataError, match=r"cut\.zip"):
        list(read_members(tmp_path / "cut.zip"))


@pytest.mark.parametrize("name", ["../evil.txt", "/etc/evil", "a/../../evil", "C:\\evil"])
@pytest.mark.parametrize("make", [write_tar, write_zip])
def test_members_outside_of_the_archive_raise(tmp_path, make, name):
    path = make(tmp_path / ("x.tar.gz" if make is write_tar else "x.zip"), {name: b"!"})
    with pytest.raises(DataError, match="points outside of the archive"):
        list(read_members(path))


def test_links_in_a_tar_are_not_followed(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        info = tarfile.TarInfo("link.txt")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    assert list(read_members(tmp_path / "x.tar")) == []


def test_other_files_raise(tmp_path):
    (tmp_path / "x.rar").write_bytes(b"Rar!")
    with pytest.raises(DataError, match=r"x\.rar is neither a folder nor a tar or zip archive"):
        list(read_members(tmp_path / "x.rar"))


@pytest.mark.parametrize("keep", [0, 1024, 39 * 1024, 40 * 1024 + 9])
def test_a_plain_tar_cut_between_members_is_rejected(tmp_path, keep):
    path = write_tar(tmp_path / "cut.tar", {f"{i}.bin": bytes([i]) * 512 for i in range(40)}, "w")
    truncate(path, keep)
    with pytest.raises(DataError, match=r"cut\.tar is damaged or truncated .*(empty|end with the two empty blocks)"):
        list(read_members(path))


@pytest.mark.parametrize("block", [b"\xff" * 512, bytes(512)])
def test_a_tar_with_a_damaged_header_is_not_taken_for_a_shorter_one(tmp_path, block):
    content = bytearray(write_tar(tmp_path / "x.tar", {f"{i}": b"1" * 512 for i in range(9)}, "w").read_bytes())
    content[4096:4608] = block
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.tar is damaged"):
        list(read_members(tmp_path / "x.tar"))


def test_a_damaged_member_of_a_zip_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/1.txt", random.Random(0).randbytes(50) * 9)
    content = bytearray((tmp_path / "x.zip").read_bytes())
    content[40:60] = b"\xff" * 20
    (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.zip: a/1\.txt is damaged or truncated \(Error -3"):
        list(read_members(tmp_path / "x.zip"))


def test_an_encrypted_zip_is_rejected(tmp_path):
    content = bytearray(write_zip(tmp_path / "x.zip", {"a": b"secret"}).read_bytes())
    content[6] = content[content.index(b"PK\x01\x02") + 8] = 1
    (tmp_path / "x.zip").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.zip: a is damaged .*encrypted"):
        list(read_members(tmp_path / "x.zip"))


def bomb_zip(path, declared=None):
    """Write a zip with 24 MiB of zeros, of which its headers may declare fewer."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.bin", ZEROS)
    if declared is not None:
        content = path.read_bytes().replace(len(ZEROS).to_bytes(4, "little"), declared.to_bytes(4, "little"))
        path.write_bytes(content)
    return path


BOMBS = {
    "zip": bomb_zip,
    "lying.zip": lambda path: bomb_zip(path, 1000),
    "tar.gz": lambda path: write_tar(path, {"a.bin": ZEROS}),
    "tar.xz": lambda path: write_tar(path, {"a.bin": ZEROS}, "w:xz"),
    "several.zip": lambda path: write_deflated(path, {f"{i}.bin": ZEROS[: 2**20] for i in range(24)}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_an_archive_that_expands_too_much_is_rejected_before_it_fills_memory(tmp_path, name):
    path = BOMBS[name](tmp_path / f"bomb.{name}")
    with limited(1), most_memory(12 * 2**20), pytest.raises(DataError, match=rf"bomb\.{name}.*(max_file_mib|CRC)"):
        list(read_members(path))
    if name in ("zip", "tar.gz"):
        with limited(24):
            assert [len(content) for _, content in read_members(path)] == [len(ZEROS)]


def test_sparse_members_are_rejected(tmp_path):
    sparse = tarfile.TarInfo("a.bin")
    header = bytearray(sparse.tobuf(tarfile.GNU_FORMAT))
    header[156:157] = b"S"
    header[483:495] = b"%011o\0" % 2**33  # the real size
    header[148:156] = b"%06o\0 " % tarfile.calc_chksums(header)[0]
    with gzip.open(tmp_path / "x.tar.gz", "wb") as file:
        file.write(bytes(header) + bytes(1024))
    assert (tmp_path / "x.tar.gz").stat().st_size < 200
    with most_memory(2**20), pytest.raises(DataError, match=r"x\.tar\.gz: a\.bin is a sparse file"):
        list(read_members(tmp_path / "x.tar.gz"))


def test_headers_of_a_tar_are_limited(tmp_path):
    huge = tarfile.TarInfo("././@LongLink")
    huge.type, huge.size = tarfile.GNUTYPE_LONGNAME, len(ZEROS)
    nested = tarfile.TarInfo("pax")
    nested.type, nested.size = tarfile.XHDTYPE, 0
    backwards = tarfile.TarInfo("back")
    backwards.size = -1024
    headers = {
        "huge": huge.tobuf() + ZEROS,
        "nested": nested.tobuf() * 2000,
        "back": backwards.tobuf(tarfile.GNU_FORMAT),
    }
    for name, content in headers.items():
        with gzip.open(tmp_path / f"{name}.tar.gz", "wb", compresslevel=1) as file:
            file.write(content + bytes(1024))
        with most_memory(12 * 2**20), pytest.raises(DataError, match=rf"{name}\.tar\.gz is damaged"):
            list(read_members(tmp_path / f"{name}.tar.gz"))
    with pytest.raises(DataError, match="a member has too many headers"):  # and not by a RecursionError
        list(read_members(tmp_path / "nested.tar.gz"))


def test_names_that_are_long_or_not_text_are_rejected(tmp_path):
    with pytest.raises(DataError, match=r"x\.tar: the name 'aaa.* has 5,000 characters; expected at most 4,096"):
        list(read_members(write_tar(tmp_path / "x.tar", {"a" * 5000: b"1"}, "w")))
    with pytest.raises(DataError, match=r"x\.tar, name of 'a\\udcff': .*lone surrogate"):
        list(read_members(write_tar(tmp_path / "x.tar", {"a\udcff": b"1"}, "w")))
