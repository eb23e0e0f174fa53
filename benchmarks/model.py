"""Stacks of blocks that differ only in their mixer: `mrconv bench model`, with its options.

python benchmarks/model.py --help
"""

import sys

from mrconv.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "model", *sys.argv[1:]]))
