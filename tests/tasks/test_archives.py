"""Folders, tars and zips give the same files, and nothing from a damaged or a malicious one."""

import io
import tarfile
import zipfile

import pytest

from mrconv.tasks.archives import digest, members
from mrconv.tasks.errors import DataError

FILES = {"a/1.txt": b"one", "a/2.bin": bytes(5000), "b/3.txt": b"three"}


def tar(path, files, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def zipped(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def folder(path, files):
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


@pytest.mark.parametrize("make", [tar, zipped, folder])
def test_all_forms_give_the_same_files(tmp_path, make):
    name = {tar: "x.tar.gz", zipped: "x.zip", folder: "x"}[make]
    path = make(tmp_path / name, FILES)
    assert dict(members(path)) == FILES
    assert [name for name, _ in members(path, lambda name: name.endswith(".txt"))] == ["a/1.txt", "b/3.txt"]


@pytest.mark.parametrize("keep", [0, 30, 60, -40])
def test_a_truncated_tar_is_told(tmp_path, keep):
    whole = tar(tmp_path / "x.tar.gz", {**FILES, "noise": digest(io.BytesIO(b"")).encode() * 99}).read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[:keep])
    with pytest.raises(DataError, match=r"cut\.tar\.gz is .*cut off.*get it again"):
        list(members(tmp_path / "cut.tar.gz"))


def test_a_tar_cut_between_two_members_is_told(tmp_path):
    whole = tar(tmp_path / "x.tar.gz", {f"{i}.bin": bytes([i]) * 512 for i in range(40)}).read_bytes()
    for keep in range(40, len(whole)):
        (tmp_path / "cut.tar.gz").write_bytes(whole[:keep])
        with pytest.raises(DataError, match="get it again"):
            list(members(tmp_path / "cut.tar.gz"))


def test_a_truncated_zip_is_told(tmp_path):
    whole = zipped(tmp_path / "x.zip", FILES).read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[:-300])
    with pytest.raises(DataError, match=r"cut\.zip"):
        list(members(tmp_path / "cut.zip"))


@pytest.mark.parametrize("name", ["../evil.txt", "/etc/evil", "a/../../evil", "C:\\evil"])
@pytest.mark.parametrize("make", [tar, zipped])
def test_members_outside_of_the_archive_are_refused(tmp_path, make, name):
    path = make(tmp_path / ("x.tar.gz" if make is tar else "x.zip"), {name: b"!"})
    with pytest.raises(DataError, match="points outside of it"):
        list(members(path))


def test_links_in_a_tar_are_not_followed(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        info = tarfile.TarInfo("link.txt")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    assert list(members(tmp_path / "x.tar")) == []


def test_anything_else_is_refused(tmp_path):
    (tmp_path / "x.rar").write_bytes(b"Rar!")
    with pytest.raises(DataError, match=r"x\.rar is neither a folder nor a tar or zip archive"):
        list(members(tmp_path / "x.rar"))
