"""Makes a tiny random Qwen3-MoE checkpoint, for demos, tests and machines without a download.

The checkpoint is a complete Hugging Face directory: safetensors under the names of the real
models, a byte-level tokenizer that round-trips any text, a chat template. Its answers mean
nothing, but they vary: weights are scaled so that a greedy response is not one repeated token.
"""

import json
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from placement.errors import ConfigError

BYTES = 256
END_OF_TEXT, PAD, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD, TURN_START, TURN_END)
END_OF_TEXT_ID = BYTES
PAD_ID = BYTES + 1

EMBEDDING_SCALE = 1.0
LOGIT_SCALE = 3.0
"""Standard deviation of the logits: sampled responses are neither uniform nor frozen."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)  # without slots: the command line reads the defaults from the class
class ModelShape:
    """Sizes, under the command line's names. About 4 million parameters by default."""

    layers: int = 2
    hidden: int = 256
    experts: int = 16
    top_k: int = 4
    expert_hidden: int = 128
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    vocab: int = 512
    max_positions: int = 4096

    def check(self) -> None:
        """Raises: ConfigError."""
        for name, size in asdict(self).items():
            if size < 1:
                raise ConfigError(f"is {size}; it must be at least 1", field=name)
        if self.top_k > self.experts:
            raise ConfigError(
                f"is {self.top_k}, above experts = {self.experts}; lower it", field="top_k"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"is {self.kv_heads}, which does not divide heads = {self.heads}",
                field="kv_heads",
            )
        if self.vocab < BYTES + len(SPECIAL_TOKENS):
            raise ConfigError(
                f"is {self.vocab}; {BYTES} bytes and {len(SPECIAL_TOKENS)} special tokens need "
                f"{BYTES + len(SPECIAL_TOKENS)}",
                field="vocab",
            )


def make_model(directory: Path, *, seed: int = 0, shape: ModelShape | None = None) -> Path:
    """Write the checkpoint; the same seed and shape make the same bytes.

    The directory appears complete or not at all.

    Raises:
        ConfigError: the shape is impossible, or ``directory`` holds something already.
    """
    shape = shape or ModelShape()
    shape.check()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is not empty; name a new directory or remove it")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        complete = Path(scratch) / "model"
        complete.mkdir()
        _write_weights(complete / "model.safetensors", shape, seed)
        _write_json(complete / "config.json", _model_config(shape))
        _write_json(complete / "generation_config.json", _generation_config())
        _write_tokenizer(complete, shape)
        if directory.exists():
            directory.rmdir()
        shutil.move(complete, directory)
    return directory


def _model_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "moe_intermediate_size": shape.expert_hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": shape.max_positions,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": END_OF_TEXT_ID,
        "pad_token_id": PAD_ID,
        "dtype": "bfloat16",
    }


def _generation_config() -> dict[str, Any]:
    return {"eos_token_id": END_OF_TEXT_ID, "pad_token_id": PAD_ID, "do_sample": True}


def _write_weights(path: Path, shape: ModelShape, seed: int) -> None:
    import torch  # noqa: PLC0415 - takes seconds, and the command line has other commands
    from safetensors.torch import save_file  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}

    def draw(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        """Each output has variance ``scale ** 2`` when the inputs have variance 1."""
        noise = torch.randn(rows, columns, generator=generator) * (scale / columns**0.5)
        tensors[f"{name}.weight"] = noise.to(torch.bfloat16)

    def ones(name: str, width: int) -> None:
        tensors[f"{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)

    draw("model.embed_tokens", shape.vocab, shape.hidden, EMBEDDING_SCALE * shape.hidden**0.5)
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        ones(f"{layer}.input_layernorm", shape.hidden)
        ones(f"{layer}.post_attention_layernorm", shape.hidden)
        ones(f"{layer}.self_attn.q_norm", shape.head_dim)
        ones(f"{layer}.self_attn.k_norm", shape.head_dim)
        query_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        draw(f"{layer}.self_attn.q_proj", query_width, shape.hidden)
        draw(f"{layer}.self_attn.k_proj", kv_width, shape.hidden)
        draw(f"{layer}.self_attn.v_proj", kv_width, shape.hidden)
        draw(f"{layer}.self_attn.o_proj", shape.hidden, query_width)
        draw(f"{layer}.mlp.gate", shape.experts, shape.hidden)
        for expert in range(shape.experts):
            mlp = f"{layer}.mlp.experts.{expert}"
            draw(f"{mlp}.gate_proj", shape.expert_hidden, shape.hidden)
            draw(f"{mlp}.up_proj", shape.expert_hidden, shape.hidden)
            draw(f"{mlp}.down_proj", shape.hidden, shape.expert_hidden)
    ones("model.norm", shape.hidden)
    draw("lm_head", shape.vocab, shape.hidden, LOGIT_SCALE)
    save_file(tensors, path, metadata={"format": "pt"})


def _byte_symbols() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    unprintable = (byte for byte in range(BYTES) if byte not in printable)
    stand_in = {byte: BYTES + number for number, byte in enumerate(unprintable)}
    return [chr(stand_in.get(byte, byte)) for byte in range(BYTES)]


def _write_tokenizer(directory: Path, shape: ModelShape) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    # Byte-level BPE without merges: every byte is a token, and its id is its value.
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": PAD,
            "additional_special_tokens": [TURN_START, TURN_END],
            "model_max_length": shape.max_positions,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
