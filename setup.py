"""The long description of the package: the README without links to files of the repository.

The pages of a package index resolve absolute links only. Everything else is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

IMAGE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", re.MULTILINE)
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
setup(long_description=LINK.sub(r"\1", IMAGE.sub("", readme)), long_description_content_type="text/markdown")
