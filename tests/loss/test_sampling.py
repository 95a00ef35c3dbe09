import pytest
import torch

from litce.loss import sample_tokens_chunked
from litce.tools.allocations import peak_new_bytes


def chi_square(counts, probabilities):
    """Return Pearson's statistic over the classes expected at least five times, and its degrees of freedom."""
    expected = probabilities * counts.sum()
    kept = expected >= 5
    return float(((counts - expected)[kept].square() / expected[kept]).sum()), int(kept.sum()) - 1


@pytest.mark.parametrize("chunk_size", [1, 7, 10_000])
@pytest.mark.parametrize("temperature", [0.5, 0.9, 2.0])
def test_samples_have_the_distribution_of_one_multinomial(temperature, chunk_size):
    g = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(40, 8, generator=g), torch.randn(40, generator=g)
    x = torch.randn(8, generator=g)
    draws = sample_tokens_chunked(x.expand(20_000, 8), weight, temperature, chunk_size, g, bias=bias)
    probabilities = ((weight @ x + bias).double() / temperature).softmax(0)
    statistic, degrees = chi_square(torch.bincount(draws, minlength=40).double(), probabilities)
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5  # four standard deviations of chi-square


def test_temperature_zero_is_argmax_and_tiny_ones_stay_finite():
    x, weight = torch.randn(3, 5, 8), torch.randn(101, 8)
    want = (x @ weight.T).argmax(-1)
    assert torch.equal(sample_tokens_chunked(x, weight, 0.0, 10), want)
    assert torch.equal(sample_tokens_chunked(x, weight, 1e-30, 10), want)


def test_own_generator_repeats_and_leaves_torchs_alone():
    x, weight = torch.randn(50, 8), torch.randn(101, 8)
    state = torch.get_rng_state()
    a, b = (sample_tokens_chunked(x, weight, 1.0, 16, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(a, b) and torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(a, sample_tokens_chunked(x, weight, 1.0, 16, torch.Generator().manual_seed(4)))


def test_bf16_weights_and_classes_at_minus_infinity():
    x, weight = torch.randn(200, 8, dtype=torch.bfloat16), torch.randn(64, 8, dtype=torch.bfloat16)
    bias = torch.full((64,), -torch.inf)
    bias[[5, 40]] = 0.0
    draws = sample_tokens_chunked(x, weight, 1.0, 8, bias=bias)
    assert set(draws.tolist()) == {5, 40}


def test_no_row_of_logits_is_held():
    x, weight = torch.randn(64, 8), torch.randn(60_000, 8)
    peak = peak_new_bytes(lambda: sample_tokens_chunked(x, weight, 1.0, 512))
    assert peak < 64 * 60_000 * 4 / 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((-1.0,), "temperature=-1.0"), ((float("inf"),), "temperature=inf"), ((1.0, 0), "chunk_size=0")],
)
def test_wrong_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        sample_tokens_chunked(torch.zeros(2, 3), torch.zeros(5, 3), *arguments)
    with pytest.raises(ValueError, match="do not fit"):
        sample_tokens_chunked(torch.zeros(2, 4), torch.zeros(5, 3))
