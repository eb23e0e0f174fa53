"""The files that `make dist` builds: valid metadata, and every file of the package in the wheel."""

import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_passes_twine(tmp_path, monkeypatch):
    copy, out = tmp_path / "copy", tmp_path / "dist"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run(["build", "--no-isolation", "--outdir", str(out), str(copy)])
    files = sorted(map(str, out.iterdir()))
    assert [Path(file).suffixes[-1] for file in files] == [".whl", ".gz"]
    run(["twine", "check", "--strict", *files])
    source = {
        path.relative_to(copy / "src").as_posix()
        for path in (copy / "src/mrconv").rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".md")
    }
    with zipfile.ZipFile(files[0]) as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == source
        (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        assert long_description(monkeypatch) in wheel.read(metadata).decode()


def test_the_long_description_has_absolute_links_only(monkeypatch):
    text, readme = long_description(monkeypatch), (ROOT / "README.md").read_text()
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == []
    assert "](https://arxiv.org/abs/2408.09453)" in text
    assert "| Your own data, tasks |" in text
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    assert code.findall(text) == code.findall(readme)


def long_description(monkeypatch):
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path(str(ROOT / "setup.py"))
    assert given["long_description_content_type"] == "text/markdown"
    return given["long_description"]


def run(command):
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_installs_a_name_that_is_not_on_pypi():
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")]
    assert [file for file in files if re.search(r"pip\s+install\s+'?mrconv\b", file.read_text())] == []
