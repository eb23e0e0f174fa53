"""One layer against length, at a constant number of elements: `mrconv bench length`, with its options.

python benchmarks/length.py --help
"""

import sys

from mrconv.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "length", *sys.argv[1:]]))
