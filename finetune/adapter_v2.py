"""Launcher of `litce finetune_adapter_v2`: `python finetune/adapter_v2.py ...`, or with `torchrun`."""

import sys

from litce.cli import main

if __name__ == "__main__":
    main(["finetune_adapter_v2", *sys.argv[1:]])
