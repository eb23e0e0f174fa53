"""One layer, against the paper's N branches and one dense FFT convolution: `mrconv bench layer`, with its options.

python benchmarks/layer.py --help
"""

import sys

from mrconv.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "layer", *sys.argv[1:]]))
