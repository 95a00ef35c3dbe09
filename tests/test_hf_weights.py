import dataclasses

import pytest
import torch

from litce.args import UsageError
from litce.config import Config
from litce.hf_config import FAMILIES
from litce.hf_weights import CONSTANTS, MODULES, Source, sources


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        (Source(("a",), ((6, 3),)), (6, 3)),
        (Source(("a",), ((6, 3),), transposed=True), (3, 6)),
        (Source(("q", "k", "v"), ((8, 3), (4, 3), (4, 3))), (16, 3)),
        (Source(("q", "k", "v"), ((8,), (8,), (8,))), (24,)),
        (Source(("q", "k", "v"), ((8, 3), (8, 3), (8, 3)), transposed=True), (3, 24)),
        (Source(("q", "k", "v"), ((8, 3), (8, 3), (8, 3)), num_heads=2), (24, 3)),
        (Source(("q", "k", "v"), ((8,), (8,), (8,)), num_heads=2), (24,)),
    ],
)
def test_split_and_join_are_inverse(source, shape):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    assert source.shape == shape
    parts = source.split(tensor)
    assert [tuple(parts[name].shape) for name in source.names] == list(source.shapes)
    assert torch.equal(source.join(parts), tensor)


def test_gpt_neox_fuses_head_by_head():
    source = Source(("q", "k", "v"), ((4,), (4,), (4,)), num_heads=2)
    parts = source.split(torch.arange(12))
    assert {name: x.tolist() for name, x in parts.items()} == {
        "q": [0, 1, 6, 7],
        "k": [2, 3, 8, 9],
        "v": [4, 5, 10, 11],
    }


def test_every_family_has_names():
    assert MODULES.keys() == FAMILIES.keys()
    with pytest.raises(UsageError, match="family: give the model_type"):
        sources(Config())


def test_a_tied_head_has_no_tensor():
    config = Config(n_layer=1, n_head=2, n_embd=16, vocab_size=7, family="gpt2")
    untied = dataclasses.replace(config, tie_embeddings=False)
    assert sources(untied).keys() - sources(config).keys() == {"lm_head.weight"}
    assert not any(CONSTANTS.search(name) for name in sources(untied))
