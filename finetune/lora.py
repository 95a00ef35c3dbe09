"""Launcher of `litce finetune_lora`: `python finetune/lora.py ...`, or with `torchrun`."""

import sys

from litce.cli import main

if __name__ == "__main__":
    main(["finetune_lora", *sys.argv[1:]])
