"""Model architecture from a Hugging Face ``config.json``: sizes, switches and rope variant.

Covers Llama, Mistral (without its sliding window), Qwen2 (bias on q, k, v) and Qwen3 (norms on q
and k); imports no torch. A setting that would change the model's output and is not implemented
raises an error with the setting's name; no setting of this kind is ignored. Rope variants with
frequencies that depend on the prompt length will never be accepted, because the keys of a stored
block would be wrong for a longer prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tierkv.kvcore import limits
from tierkv.kvcore.errors import ModelFolderError


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling of low rope frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base frequency and frequency scaling of rope.

    Attributes:
        theta: base.
        stretch: factor that multiplies all wavelengths (variant linear).
        scaling: the scaling of Llama 3.1 and later (variant llama3).
    """

    theta: float
    stretch: float = 1.0
    scaling: Llama3Scaling | None = None


def parse_rope(config: Mapping[str, Any]) -> RopeConfig:
    """Read rope settings: ``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``.

    Raises:
        ModelFolderError: the variant is not default, linear or llama3, rotation is partial, or a
            number that the variant needs is missing.
    """
    settings = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    theta = float(settings.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ModelFolderError(f"partial rotary embedding (factor {partial}) is not supported")
    variant = settings.get("rope_type") or settings.get("type") or "default"
    try:
        return _variant(variant, theta, settings)
    except KeyError as missing:
        raise ModelFolderError(
            f"config.json has no {missing.args[0]!r} for rope variant {variant!r}"
        ) from missing


def _variant(variant: str, theta: float, settings: Mapping[str, Any]) -> RopeConfig:
    if variant == "default":
        return RopeConfig(theta)
    if variant == "linear":
        return RopeConfig(theta, stretch=float(settings["factor"]))
    if variant != "llama3":
        raise ModelFolderError(
            f"rope variant {variant!r} (rope_type) is not supported",
            hint="Supported are default, linear and llama3.",
        )
    scaling = Llama3Scaling(
        float(settings["factor"]),
        float(settings["low_freq_factor"]),
        float(settings["high_freq_factor"]),
        int(settings["original_max_position_embeddings"]),
    )
    return RopeConfig(theta, scaling=scaling)


FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes and switches of a decoder.

    Attributes:
        name: Hugging Face class name.
        vocab_tokens: size of the vocabulary.
        hidden: width of the residual stream.
        inner: width of the feed-forward part.
        layers: number of decoder layers.
        heads: query heads.
        kv_heads: key/value heads; divides ``heads``.
        head_dim: channels per head; even.
        norm_eps: epsilon of every rms norm.
        tied: whether the output head shares the weights of the embedding.
        qkv_bias: bias on the q, k and v projections.
        out_bias: bias on the attention output projection.
        mlp_bias: bias on the feed-forward projections.
        qk_norm: rms norm per head on q and k before rope.
        rope: rotary settings.
        context_tokens: trained context length, limited to ``MAX_CONTEXT_TOKENS``.
    """

    name: str
    vocab_tokens: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    context_tokens: int


def parse_architecture(config: Mapping[str, Any]) -> Architecture:
    """Read a ``config.json``.

    Raises:
        ModelFolderError: the family or a setting is unsupported, or a size is missing.
    """
    family = _family(config)
    _refuse_unsupported(config, family)
    try:
        return _sizes(config, family)
    except KeyError as missing:
        raise ModelFolderError(f"config.json has no {missing.args[0]!r}") from missing


def _family(config: Mapping[str, Any]) -> str:
    names = [str(n) for n in config.get("architectures") or ()]
    for family, name in FAMILIES.items():
        if name in names or (not names and config.get("model_type") == family):
            return family
    found = ", ".join(names) or repr(config.get("model_type"))
    raise ModelFolderError(
        f"architecture {found} is not supported",
        hint=f"Supported are {', '.join(FAMILIES.values())}.",
    )


def _refuse_unsupported(config: Mapping[str, Any], family: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelFolderError(f"activation {activation!r} is not supported; only silu is")
    _refuse_sliding_window(config, family)
    if config.get("quantization_config"):
        raise ModelFolderError("quantised weights are not supported; use the float checkpoint")
    if family == "llama" and config.get("pretraining_tp", 1) not in (None, 1):
        raise ModelFolderError("pretraining_tp other than 1 is not supported")


def _refuse_sliding_window(config: Mapping[str, Any], family: str) -> None:
    kinds = set(config.get("layer_types") or ())
    if kinds - {"full_attention"}:
        raise ModelFolderError(
            f"layer_types has {', '.join(sorted(kinds - {'full_attention'}))}: sliding window "
            "attention is not supported"
        )
    # Mistral's reference code uses a window of 4096 if the folder does not set one.
    window = config.get("sliding_window", 4_096 if family == "mistral" else None)
    slides = family == "mistral" or (bool(config.get("use_sliding_window")) and not kinds)
    if window is not None and slides:
        raise ModelFolderError(
            f"sliding_window {window}: sliding window attention is not supported",
            hint="Use a folder whose sliding_window is null.",
        )


def _sizes(config: Mapping[str, Any], family: str) -> Architecture:
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    attention_bias = bool(config.get("attention_bias", False))
    if heads % kv_heads or head_dim % 2:
        raise ModelFolderError(
            f"{heads} heads over {kv_heads} key/value heads of {head_dim} channels do not divide"
        )
    return Architecture(
        name=FAMILIES[family],
        vocab_tokens=int(config["vocab_size"]),
        hidden=int(config["hidden_size"]),
        inner=int(config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or (attention_bias and family != "mistral"),
        out_bias=attention_bias and family in ("llama", "qwen3"),
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        rope=parse_rope(config),
        context_tokens=min(
            int(config.get("max_position_embeddings", 2_048)), limits.MAX_CONTEXT_TOKENS
        ),
    )
