"""Launcher of `litce finetune_adapter`: `python finetune/adapter.py ...`, or with `torchrun`."""

import sys

from litce.cli import main

if __name__ == "__main__":
    main(["finetune_adapter", *sys.argv[1:]])
