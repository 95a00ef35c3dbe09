"""litce: pretrain and finetune language models with large vocabularies on the memory you have."""

__version__ = "0.1.0"
