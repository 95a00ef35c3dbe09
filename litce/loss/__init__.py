"""Cross-entropy of a linear head over a large vocabulary, in the memory there is."""

from litce.loss.linear_cross_entropy import linear_cross_entropy
from litce.loss.logits import chunked_cross_entropy
from litce.loss.plan import CrossEntropyPlan, auto_cross_entropy_chunk_size, plan_cross_entropy

__all__ = [
    "CrossEntropyPlan",
    "auto_cross_entropy_chunk_size",
    "chunked_cross_entropy",
    "linear_cross_entropy",
    "plan_cross_entropy",
]
