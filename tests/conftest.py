import os

import torch

# Before anything imports triton, whose functions ask for it when they are defined: without a GPU kernels are tested in
# its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
