"""Cross-entropy of a linear head over a large vocabulary, in the memory there is."""

from litce.loss.linear_cross_entropy import cut_cross_entropy, cut_cross_entropy_logprobs, linear_cross_entropy
from litce.loss.logits import chunked_cross_entropy
from litce.loss.plan import CrossEntropyPlan, auto_cross_entropy_chunk_size, plan_cross_entropy
from litce.loss.sampling import sample_tokens_chunked
from litce.loss.token_stats import TokenStats, linear_token_stats

__all__ = [
    "CrossEntropyPlan",
    "TokenStats",
    "auto_cross_entropy_chunk_size",
    "chunked_cross_entropy",
    "cut_cross_entropy",
    "cut_cross_entropy_logprobs",
    "linear_cross_entropy",
    "linear_token_stats",
    "plan_cross_entropy",
    "sample_tokens_chunked",
]
