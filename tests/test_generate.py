import itertools
import json

import pytest
import torch
from safetensors.torch import save_file

from litce import llm as llm_module
from litce.args import UsageError
from litce.config import Config
from litce.generate import generate as generate_batch
from litce.generate import sample_tokens, setup, stream
from litce.model import GPT
from litce.tokenizer import Tokenizer
from tests.tiny import save_byte_tokenizer


@pytest.fixture(params=["learned", "rope"])
def model(request):
    torch.manual_seed(0)
    config = Config(
        block_size=16,
        vocab_size=50,
        padded_vocab_size=64,
        n_layer=2,
        n_head=2,
        n_embd=16,
        positions=request.param,
        tie_embeddings=False,
    )
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        # It would favour the same few tokens everywhere.
        model.transformer.ln_f.bias.zero_()
        # Most of the mass lies on the padding, where no token is.
        model.lm_head.weight[50:] *= 20
    return model


def generate(model, prompt, **options):
    """The continuation of one prompt."""
    (ids,) = generate_batch(model, [prompt], **options)
    return ids


def greedy_by_hand(model, ids, steps, vocab_size):
    ids = list(ids)
    for _ in range(steps):
        logits = model(torch.tensor([ids[-model.max_seq_length :]]))[0, -1, :vocab_size]
        ids.append(int(logits.argmax()))
    return ids


def test_temperature_0_is_argmax_over_the_last_window(model):
    prompt = [3, 1, 4, 1, 5]
    expected = greedy_by_hand(model, prompt, 30, 50)
    assert generate(model, prompt, max_new_tokens=30, temperature=0.0) == expected[5:]
    assert generate(model, prompt, max_new_tokens=30, top_k=1) == expected[5:]


def test_window_crops_a_long_prompt(model):
    prompt = [i % 50 for i in range(40)]
    expected = greedy_by_hand(model, prompt, 4, 50)[40:]
    assert generate(model, prompt, max_new_tokens=4, temperature=0.0) == expected
    assert generate(model, prompt[-16:], max_new_tokens=4, temperature=0.0) == expected
    model.max_seq_length = 8
    assert generate(model, prompt, max_new_tokens=4, temperature=0.0) == greedy_by_hand(model, prompt, 4, 50)[40:]


def test_seed_decides_the_text(model):
    def run(seed):
        rng = torch.Generator().manual_seed(seed)
        return generate(model, [1], max_new_tokens=20, temperature=2.0, top_k=None, generator=rng)

    assert run(0) == run(0)
    assert len({tuple(run(seed)) for seed in range(5)}) == 5


@pytest.mark.parametrize("vocab_size", [50, 7])
def test_no_id_outside_the_vocabulary(model, vocab_size):
    for temperature, top_k in itertools.product((0.0, 1.0, 50.0), (None, 60)):
        ids = generate(model, [1], max_new_tokens=40, temperature=temperature, top_k=top_k, vocab_size=vocab_size)
        assert len(ids) == 40 and max(ids) < vocab_size
    # Left out, the model's own vocabulary without its padding is the limit.
    assert max(generate(model, [1], max_new_tokens=60, temperature=50.0, top_k=None)) < 50


def test_a_stop_id_ends_the_text_and_is_left_out(model):
    full = generate(model, [2, 3], max_new_tokens=30, temperature=0.0)
    eos = full[4]
    assert generate(model, [2, 3], max_new_tokens=30, temperature=0.0, stop_ids=[eos]) == full[: full.index(eos)]
    assert generate(model, [eos], max_new_tokens=1, temperature=0.0, stop_ids=[49]) != []


def test_only_the_last_position_reaches_the_head(model):
    rows = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(args[0].shape[:-1].numel()))
    generate(model, [1] * 12, max_new_tokens=3)
    assert rows == [1, 1, 1]


def test_the_model_can_train_after_generating(model):
    generate(model, [1, 2], max_new_tokens=2)
    model(torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64)).backward()
    assert model.lm_head.weight.grad is not None


def test_mode_and_cache_are_those_from_before(model):
    model.set_kv_cache(3, 9)
    cache = model.kv_cache
    for training in (True, False):
        model.train(training)
        steps = stream(model, [[1, 2]], max_new_tokens=5)
        next(steps)
        assert not model.training and model.kv_cache is not cache
        steps.close()
        assert model.training == training and model.kv_cache is cache
        generate(model, [1, 2], max_new_tokens=2)
        assert model.training == training and model.kv_cache is cache
    model.transformer.h[1].register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(model, [1, 2], max_new_tokens=2)
    assert model.kv_cache is cache


def test_the_cache_spares_what_was_computed(model):
    lengths = []
    model.transformer.wte.register_forward_hook(lambda module, args, output: lengths.append(args[0].size(1)))
    generate(model, [1] * 10, max_new_tokens=9)
    # The window of 16 is full after six steps, and slides from then on.
    assert lengths == [10, 1, 1, 1, 1, 1, 1, 16, 16]


PROMPTS = [[3, 1, 4, 1, 5], [9], [i % 50 for i in range(40)], [2, 6, 5, 3, 5, 8, 9, 7, 9, 3]]


@pytest.mark.parametrize("new_tokens", [6, 30])
@pytest.mark.parametrize("rows", [(0, 1, 3), (0, 1, 2, 3), (1, 3), (3, 3)])
def test_a_batch_is_one_by_one(model, rows, new_tokens):
    prompts = [PROMPTS[row] for row in rows]
    alone = [generate(model, prompt, max_new_tokens=new_tokens, temperature=0.0) for prompt in prompts]
    assert len({token for ids in alone for token in ids}) > 2
    assert generate_batch(model, prompts, max_new_tokens=new_tokens, temperature=0.0) == alone
    assert generate_batch(model, [], max_new_tokens=1) == []


def test_each_sequence_of_a_batch_stops_on_its_own(model):
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    full = generate_batch(model, prompts, max_new_tokens=9, temperature=0.0)
    stops = [full[0][5], full[1][7], full[2][8]]
    cut = [next((ids[:i] for i, token in enumerate(ids) if token in stops), ids) for ids in full]
    assert len({len(ids) for ids in cut}) > 1
    assert generate_batch(model, prompts, max_new_tokens=9, temperature=0.0, stop_ids=stops) == cut


def test_rows_draw_on_their_own_and_the_global_generator_stays(model):
    state = torch.get_rng_state()
    rng = torch.Generator().manual_seed(0)
    first, second = generate_batch(
        model, [[1], [1]], max_new_tokens=20, temperature=2.0, top_k=None, top_p=0.95, generator=rng
    )
    assert first != second and torch.equal(torch.get_rng_state(), state)


def frequencies(logits, draws=10000, **options):
    rng = torch.Generator().manual_seed(0)
    drawn = sample_tokens(logits.expand(draws, -1), generator=rng, **options)
    return torch.bincount(drawn, minlength=len(logits)) / draws


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 3, 99])
def test_samples_follow_the_softmax(temperature, top_k):
    logits = torch.tensor([2.0, -1.0, 0.5, 1.0, 0.0])
    expected = (logits / temperature).double().exp()
    if top_k == 3:
        expected[[1, 4]] = 0
    expected /= expected.sum()
    actual = frequencies(logits, temperature=temperature, top_k=top_k, top_p=1.0)
    # Five standard deviations of a share of 10000 draws.
    assert ((actual - expected).abs() <= 5 * (expected * (1 - expected) / 10000).sqrt() + 1e-12).all()


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [(0.1, None, [0]), (0.55, None, [0, 3]), (0.8, None, [0, 3, 2]), (0.95, None, [0, 3, 2, 4]), (0.75, 3, [0, 3])],
)
def test_top_p_keeps_the_fewest_likeliest_that_reach_it(top_p, top_k, kept):
    probabilities = torch.tensor([0.5, 0.02, 0.18, 0.22, 0.08])
    expected = torch.zeros(5)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    actual = frequencies(probabilities.log(), temperature=1.0, top_k=top_k, top_p=top_p)
    assert ((actual - expected).abs() <= 5 * (expected * (1 - expected) / 10000).sqrt() + 1e-12).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tiny_temperature_of_large_logits_is_argmax(dtype):
    logits = torch.tensor([3.0e4, 2.9e4, -3.0e4]).to(dtype)
    for top_p in (0.5, 1.0):
        assert {int(sample_tokens(logits, 1e-36, None, top_p, None)) for _ in range(20)} == {0}


BAD_OPTIONS = [
    ({"max_new_tokens": 0}, "--max_new_tokens: must be at least 1, got 0"),
    ({"max_new_tokens": -3}, "--max_new_tokens: must be at least 1, got -3"),
    ({"temperature": -0.1}, "--temperature: must be 0 .* or more, got -0.1"),
    ({"temperature": float("nan")}, "--temperature: .* got nan"),
    ({"top_k": 0}, "--top_k: must be at least 1, .* got 0"),
    ({"top_p": 0.0}, "--top_p: must be above 0 and at most 1 .* got 0.0"),
    ({"top_p": 1.5}, "--top_p: must be above 0 and at most 1 .* got 1.5"),
    ({"top_p": float("nan")}, "--top_p: .* got nan"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_of_the_function(model, options, message):
    with pytest.raises(UsageError, match=message):
        generate(model, [1], **{"max_new_tokens": 1, **options})


def test_bad_prompts_of_the_function(model):
    with pytest.raises(UsageError, match="prompt: needs at least one token"):
        generate(model, [], max_new_tokens=1)
    with pytest.raises(UsageError, match="token id 64 is outside the model's vocabulary of 64"):
        generate(model, [1, 64], max_new_tokens=1)


@pytest.fixture
def checkpoint_dir(tmp_path):
    """A random model whose tokenizer has one id per byte, and `<eos>`."""
    save_byte_tokenizer(tmp_path)
    config = Config(block_size=8, vocab_size=300, n_layer=1, n_head=2, n_embd=16)
    config.save(tmp_path / "model_config.yaml")
    torch.manual_seed(0)
    model = GPT(config)
    model.init_weights()
    save_file(model.state_dict(), tmp_path / "lit_model.safetensors")
    return tmp_path


def test_command_prints_prompt_and_continuation(checkpoint_dir, capsys):
    setup(checkpoint_dir, "día", max_new_tokens=5, seed=1)
    first = capsys.readouterr()
    assert first.out.startswith("día") and len(first.out) > len("día\n") and first.err == ""
    setup(checkpoint_dir, "día", max_new_tokens=5, seed=1)
    assert capsys.readouterr().out == first.out
    setup(checkpoint_dir, "día", max_new_tokens=5, seed=2)
    assert capsys.readouterr().out != first.out


def test_command_reports_a_prompt_longer_than_the_window(checkpoint_dir, capsys):
    setup(checkpoint_dir, "0123456789", max_new_tokens=1)
    captured = capsys.readouterr()
    assert captured.err == "The prompt has 10 tokens; the model sees the last 8 of them.\n"
    assert captured.out.startswith("0123456789")


def test_command_starts_an_empty_prompt_from_bos(checkpoint_dir, capsys):
    with pytest.raises(UsageError, match="--prompt: got '', and the tokenizer has no bos token"):
        setup(checkpoint_dir, "", max_new_tokens=2)
    save_byte_tokenizer(checkpoint_dir, bos="<bos>")
    setup(checkpoint_dir, "", max_new_tokens=2)
    assert capsys.readouterr().out.strip("\n")


@pytest.mark.parametrize("bos", [None, "<bos>"])
def test_command_feeds_bos_and_prints_the_text_alone(checkpoint_dir, capsys, monkeypatch, bos):
    save_byte_tokenizer(checkpoint_dir, bos=bos)
    tokenizer = Tokenizer(checkpoint_dir)
    seen = []

    def continue_with_text(model, prompts, **options):
        seen.append((*prompts, options["stop_ids"], options["vocab_size"]))
        yield from ([token_id] for token_id in tokenizer.encode("ía"))

    monkeypatch.setattr(llm_module, "stream", continue_with_text)
    setup(checkpoint_dir, "d")
    # 259 ids are in use, of the 300 that the model has.
    assert seen == [([257] * (bos is not None) + tokenizer.encode("d"), {256}, 259)]
    assert capsys.readouterr().out == "día\n"


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_command_checks_its_options_before_loading(checkpoint_dir, monkeypatch, options, message):
    def no_loading(*args, **kwargs):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(llm_module, "load_model", no_loading)
    with pytest.raises(UsageError, match=message):
        setup(checkpoint_dir, "a", **options)
    with pytest.raises(UsageError, match="--prompt"):
        setup(checkpoint_dir, "")


def test_command_says_what_a_folder_lacks_before_it_reads_anything(checkpoint_dir, tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    with pytest.raises(
        UsageError, match="holds no model_config.yaml; give a folder that training wrote, such as RUN/f"
    ):
        setup(run, "a")
    (checkpoint_dir / "state").mkdir()
    (checkpoint_dir / "state/optimizer.pt").touch()
    progress = {"step": 1, "num_tokens": 1, "epoch": 0, "num_samples": 0}
    (checkpoint_dir / "state/progress.json").write_text(json.dumps(progress))
    checkpoint_dir.rename(run / "final")
    with pytest.raises(UsageError, match=f"{run} holds no model_config.yaml; did you mean {run / 'final'}?"):
        setup(run, "a")
    (run / "final/tokenizer.json").unlink()
    with pytest.raises(
        UsageError, match="final holds no tokenizer.json; copy the model's tokenizer files there"
    ) as error:
        setup(run / "final", "a")
    assert "--tokenizer_dir" not in str(error.value)


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_command_refuses_a_seed_that_no_generator_takes(checkpoint_dir, seed):
    with pytest.raises(UsageError, match=f"--seed {seed}: must be from 0 to 4294967295"):
        setup(checkpoint_dir, "a", seed=seed)
