import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.model_check import find_problems, read_model_config
from actors.settings import GroupSettings, ModelSettings, RuntimeSettings
from deploy.make_model import END_OF_TEXT_ID, PAD_ID, ModelShape, make_model
from placement.errors import ConfigError

SMALL = ModelShape(layers=1, hidden=64, experts=4, top_k=2, expert_hidden=32, heads=2, kv_heads=1)

pytestmark = pytest.mark.timeout(180)  # the first import of transformers takes its time


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def test_the_default_model_can_be_served_by_four_workers(model: Path) -> None:
    settings = RuntimeSettings(
        model=ModelSettings(path=str(model)), group=GroupSettings(max_workers=4)
    )
    assert find_problems(read_model_config(model), settings) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        " two  spaces\n\ttab ",
        "héllo 世界 🙂",
        "\x00\x7f",
        "a<b> 'quoted'",
        "ﬁ e\u0301",
    ],
)
def test_the_tokenizer_round_trips_any_text(model: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    token_ids = tokenizer.encode(text)
    assert token_ids == list(text.encode())
    assert tokenizer.decode(token_ids) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (END_OF_TEXT_ID, PAD_ID)


def test_the_chat_template_marks_turns_with_single_tokens(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert sum(token_id > PAD_ID for token_id in tokenizer.encode(text)) == 3


def test_greedy_responses_vary(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    responses = []
    for prompt in ("hello", "What is 2 + 2?"):
        prompt_ids = torch.tensor([tokenizer.encode(prompt)])
        made = network.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=32,
            min_new_tokens=32,
            do_sample=False,
        )
        responses.append(made[0, prompt_ids.shape[1] :].tolist())
    assert responses[0] != responses[1]
    assert all(len(set(response)) > 8 for response in responses)


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    def digest(name: str, seed: int) -> str:
        weights = make_model(tmp_path / name, seed=seed, shape=SMALL) / "model.safetensors"
        return hashlib.sha256(weights.read_bytes()).hexdigest()

    assert digest("a", 1) == digest("b", 1) != digest("c", 2)


def test_a_directory_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        make_model(tmp_path, shape=SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        (ModelShape(layers=0), "layers"),
        (ModelShape(top_k=17), "top_k"),
        (ModelShape(kv_heads=3), "kv_heads"),
        (ModelShape(vocab=256), "vocab"),
    ],
)
def test_an_impossible_shape_is_refused(tmp_path: Path, shape: ModelShape, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_model(tmp_path / "model", shape=shape)
    assert refused.value.field == field
    assert list(tmp_path.iterdir()) == []
