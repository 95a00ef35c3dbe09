"""Launcher of `litce finetune_full`: `python finetune/full.py ...`, or with `torchrun`."""

import sys

from litce.cli import main

if __name__ == "__main__":
    main(["finetune_full", *sys.argv[1:]])
