"""Launcher of `litce pretrain`: `python pretrain.py ...` or `torchrun pretrain.py ...`."""

import sys

from litce.cli import main

if __name__ == "__main__":
    main(["pretrain", *sys.argv[1:]])
