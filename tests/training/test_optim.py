from typing import Any

import pytest
import torch
from torch import nn

from litce.args import UsageError
from litce.config import Config
from litce.model import GPT
from litce.training.optim import ADAMW_DEFAULTS, LearningRate, resolve_optimizer
from tests.tiny import MODEL


@pytest.mark.parametrize(
    "spec",
    [
        "SGD",
        "torch.optim.SGD",
        {"class_path": "SGD", "init_args": {"lr": 0.5, "momentum": 0.9}},
        {"class_path": "SGD", "init_args": {"lr": 0.1}, "lr": 0.5, "momentum": 0.9},
    ],
)
def test_names_and_dicts(spec: str | dict[str, Any]) -> None:
    before = str(spec)
    resolved = resolve_optimizer(spec)
    assert resolved.cls is torch.optim.SGD and str(spec) == before
    assert resolved.lr == (0.001 if isinstance(spec, str) else 0.5)


def test_adamw_is_the_default_class() -> None:
    resolved = resolve_optimizer({"lr": 0.5, "betas": [0.8, 0.9]})
    assert resolved.cls is torch.optim.AdamW
    assert resolved.init_args == {**ADAMW_DEFAULTS, "lr": 0.5, "betas": (0.8, 0.9)}


def test_1d_parameters_do_not_decay_and_frozen_ones_are_left_out() -> None:
    model = GPT(Config(**MODEL))
    model.transformer.wpe.requires_grad_(False)
    optimizer = resolve_optimizer("AdamW").build(model)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        expected = None if name == "transformer.wpe.weight" else 0.1 if parameter.ndim >= 2 else 0.0
        assert decay.get(id(parameter)) == expected, name


def test_a_model_of_matrices_alone_has_no_empty_group() -> None:
    assert len(resolve_optimizer("AdamW").build(nn.Linear(2, 2, bias=False)).param_groups) == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("Adamm", "--optimizer Adamm: .*no attribute"),
        ("no_such_package.Adam", "--optimizer no_such_package.Adam: No module"),
        ("torch.nn.Linear", "torch.nn.Linear is not an optimizer"),
        ("Optimizer", "Optimizer is not an optimizer"),
        ({"lr": -1.0}, "does not take .*Invalid learning rate"),
        ({"class_path": "SGD", "lrr": 1.0}, "unknown option --optimizer.lrr of SGD; did you mean --optimizer.lr"),
        *[
            ({"lr": value}, f"--optimizer.lr {written}: expected a finite number such as 0.001")
            for value, written in [
                ("abc", "abc"),
                ("nan", "nan"),
                (float("nan"), "nan"),
                (float("inf"), "inf"),
                (None, "null"),
                (True, "true"),
                ([1, 2], r"\[1, 2\]"),
            ]
        ],
        ({"weight_decay": "x"}, "--optimizer.weight_decay x: expected a finite number"),
        ({"class_path": "SGD", "momentum": None}, "--optimizer.momentum null: expected a finite number"),
        ({"betas": 3}, r"--optimizer.betas 3: expected numbers such as \[0.9, 0.999\]"),
        ({"betas": [0.9, "x"]}, r'--optimizer.betas \[0.9, "x"\]: expected numbers such as'),
        ({"betas": [0.9]}, r"AdamW does not take .*betas=\[0.9\]"),
        ({"amsgrad": "maybe"}, "--optimizer.amsgrad maybe: expected true or false"),
        ({"class_path": 3}, "--optimizer.class_path 3: give a class of torch.optim"),
        ({"class_path": None}, "--optimizer.class_path null: give a class of torch.optim"),
        ({"class_path": ""}, "--optimizer : .*give a class of torch.optim"),
        ({"class_path": "..x.Adam"}, "--optimizer ..x.Adam: .*give a class of torch.optim"),
        ({"init_args": 3}, "--optimizer.init_args 3: give arguments such as --optimizer.lr 0.001"),
    ],
)
def test_refused(spec: str | dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        resolve_optimizer(spec)
    assert "\n" not in str(caught.value)


def usable(name: str) -> bool:
    try:
        resolve_optimizer({"class_path": name, "lr": 0.01}).require_usable(torch.device("cpu"))
    except UsageError as error:
        assert f"--optimizer {name} cannot train a model" in str(error) and "\n" not in str(error)
        return False
    return True


def test_classes_that_cannot_train_a_model_are_refused() -> None:
    """One needs a closure, one sparse gradients, one matrices alone; all others of torch.optim can be used."""
    names = [
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    ]
    assert {name for name in names if not usable(name)} == {"LBFGS", "SparseAdam", *({"Muon"} & set(names))}
    assert len(names) > 10


def test_the_trial_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    resolve_optimizer("AdamW").require_usable(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)


def test_schedule() -> None:
    rate = LearningRate(peak=1.0, minimum=0.1, warmup_steps=4, total_steps=14)
    assert [rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(4) == 1.0
    # Half-way down the cosine, and its end, beyond which the rate stays.
    assert rate(9) == pytest.approx(0.55)
    assert rate(14) == rate(1000) == pytest.approx(0.1)
    assert all(rate(step + 1) < rate(step) for step in range(4, 13))


@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(0, 1), (0, 5), (1, 2), (4, 5), (0, None), (3, None)])
def test_every_applied_rate_is_above_0(warmup_steps: int, total_steps: int | None) -> None:
    rate = LearningRate(1.0, 0.0, warmup_steps, total_steps)
    assert all(rate(step) > 0 for step in range(total_steps or 10))
    assert max(rate(step) for step in range(total_steps or 10)) == 1.0


def test_without_a_length_the_rate_stays_at_its_peak() -> None:
    assert LearningRate(1.0, 0.0, 2, None)(10**6) == 1.0


@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(1, 1), (5, 5), (6, 5)])
def test_warmup_has_to_end(warmup_steps: int, total_steps: int) -> None:
    with pytest.raises(UsageError, match=f"--train.lr_warmup_steps {warmup_steps} .* {total_steps};"):
        LearningRate(1.0, 0.0, warmup_steps, total_steps)


def test_minimum_above_peak_and_peak_of_0() -> None:
    with pytest.raises(UsageError, match="--train.min_lr 2.0 is above the optimizer's learning rate 1.0"):
        LearningRate(1.0, 2.0, 0, 5)
    with pytest.raises(UsageError, match="--optimizer.lr 0.0"):
        LearningRate(0.0, 0.0, 0, 5)
