"""Model folders for both vLLM and our compute node: random weights, a word per token.

Used by bench.engines. Every token is a word with the token's id at the end. Therefore the ids of an
answer can be read from the text of any server, and the first token is visible as soon as the server
sends the token. Nothing is downloaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

Tensor = torch.Tensor
FIRST_TOKEN: Final = 10
_WORD: Final = "w"
_CONTEXT: Final = 8_192


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a Llama model.

    Attributes:
        name: name in metrics.
        hidden: width; each head is ``head_dim`` wide.
        inner: width of the feed-forward layers.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        vocabulary: number of tokens.
    """

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's KV in float32."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 4

    def config(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": _CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


TINY: Final = ModelSize("tiny", 2, 64, 128, 2, 1, 32, 4_000)
LARGE: Final = ModelSize("132m", 12, 768, 2_304, 12, 4, 64, 32_000)


def write_model(size: ModelSize, folder: Path, *, seed: int) -> int:
    """Write a model folder.

    Returns:
        parameters: number of values in the weights.
    """
    folder.mkdir(parents=True)
    tensors = _weights(size, torch.Generator().manual_seed(seed))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", size.config())
    _write(folder / "tokenizer.json", _tokenizer(size.vocabulary))
    _write(folder / "tokenizer_config.json", _TOKENIZER_CONFIG)
    return sum(tensor.numel() for tensor in tensors.values())


def token_of(word: str) -> int:
    """Return the id of a word."""
    return int(word.removeprefix(_WORD))


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value))


def _weights(size: ModelSize, random: torch.Generator) -> dict[str, Tensor]:
    """Return weights with activations near 1.0, so answers depend on the whole prompt."""

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random).mul_(float(columns**-0.5))

    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    tensors = {
        "model.embed_tokens.weight": torch.randn(size.vocabulary, size.hidden, generator=random),
        "model.norm.weight": torch.ones(size.hidden),
        "lm_head.weight": matrix(size.vocabulary, size.hidden),
    }
    for layer in range(size.layers):
        at = f"model.layers.{layer}."
        tensors |= {
            f"{at}input_layernorm.weight": torch.ones(size.hidden),
            f"{at}post_attention_layernorm.weight": torch.ones(size.hidden),
            f"{at}self_attn.q_proj.weight": matrix(queries, size.hidden),
            f"{at}self_attn.k_proj.weight": matrix(keys, size.hidden),
            f"{at}self_attn.v_proj.weight": matrix(keys, size.hidden),
            f"{at}self_attn.o_proj.weight": matrix(size.hidden, queries),
            f"{at}mlp.gate_proj.weight": matrix(size.inner, size.hidden),
            f"{at}mlp.up_proj.weight": matrix(size.inner, size.hidden),
            f"{at}mlp.down_proj.weight": matrix(size.hidden, size.inner),
        }
    return tensors


def _tokenizer(vocabulary: int) -> dict[str, Any]:
    """Return a ``tokenizer.json`` with a word per token, split at white space."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {f"{_WORD}{token}": token for token in range(vocabulary)},
            "unk_token": f"{_WORD}0",
        },
    }


_TOKENIZER_CONFIG: Final[dict[str, Any]] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": _CONTEXT,
    "clean_up_tokenization_spaces": False,
    "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
}
