"""Reading of folders, tar and zip archives; damaged and malicious archives raise."""

import io
import tarfile

import pytest

from mrconv.tasks.archives import checksum, read_members
from mrconv.tasks.errors import DataError

from .data_files import truncate, write_files, write_tar, write_zip

FILES = {"a/1.txt": b"one", "a/2.bin": bytes(5000), "b/3.txt": b"three"}


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
