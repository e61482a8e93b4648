"""The network for training: a plain Llama decoder with a shared prefix.

All rows of a batch begin with the same instruction, so its tokens run through the layers once and
every row attends to the result. The attention is kept on demand for the guidance loss, and
parameters convert to and from the names used by transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-5)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys `[..., tokens, head]` to their positions."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(nn.Module):
    """One decoder layer.

    Attributes:
        attention: Attention of the rows `[rows, kv heads, group, tokens, keys]` in the latest call
            with `keep`.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.heads: int = config.num_attention_heads
        self.kv: int = config.num_key_value_heads or self.heads
        self.size: int = config.head_dim or width // self.heads
        self.attention: Tensor | None = None
        self.input_layernorm, self.post_attention_layernorm = Norm(width), Norm(width)
        self.q_proj = nn.Linear(width, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, self.kv * self.size, bias=False)
        self.v_proj = nn.Linear(width, self.kv * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, width, bias=False)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, keep: bool) -> Tensor:
        """Attend within a batch; on a CPU far faster than the backward pass of the fused kernel."""
        rows, _, tokens, _ = q.shape
        keys, group = k.shape[2], self.heads // self.kv
        flat = rows * self.kv
        scores = torch.bmm(
            (q * self.size**-0.5).reshape(flat, group * tokens, self.size),
            k.reshape(flat, keys, self.size).transpose(1, 2),
        )
        weights = (scores.view(flat, group, tokens, keys) + mask).softmax(-1)
        if keep:
            self.attention = weights.view(rows, self.kv, group, tokens, keys)
        out = torch.bmm(weights.view(flat, group * tokens, keys), v.reshape(flat, keys, self.size))
        out = out.view(rows, self.heads, tokens, self.size).transpose(1, 2)
        return out.reshape(rows * tokens, self.heads * self.size)

    def forward(
        self, x: Tensor, shape: tuple[int, int, int], tables: tuple[Tensor, ...], keep: bool
    ) -> Tensor:
        """Run the layer.

        Args:
            x: `[prefix + rows * tokens, width]`: the prefix, then all rows in sequence.
            shape: Length of the prefix, number of rows, tokens per row.
            tables: Cosines and sines of the positions, and the causal mask over all positions.
            keep: Whether to keep the attention.

        Returns:
            The output, in the shape of the input.
        """
        prefix, rows, tokens = shape
        cos, sin, mask = tables
        y = self.input_layernorm(x)

        def split(z: Tensor, heads: int, turn: bool) -> tuple[Tensor, Tensor]:
            a = z[:prefix].view(1, prefix, heads, self.size).transpose(1, 2)
            b = z[prefix:].view(rows, tokens, heads, self.size).transpose(1, 2)
            if turn:
                a = rotate(a, cos[:prefix], sin[:prefix])
                b = rotate(b, cos[prefix:], sin[prefix:])
            return a, b

        q, q_rows = split(self.q_proj(y), self.heads, True)
        k, k_rows = split(self.k_proj(y), self.kv, True)
        v, v_rows = split(self.v_proj(y), self.kv, False)
        first = self._attend(q, k, v, mask[:prefix, :prefix], False)
        k_all = torch.cat((k.expand(rows, -1, -1, -1), k_rows), 2)
        v_all = torch.cat((v.expand(rows, -1, -1, -1), v_rows), 2)
        second = self._attend(q_rows, k_all, v_all, mask[prefix:], keep)
        x = x + self.o_proj(torch.cat((first, second)))
        y = self.post_attention_layernorm(x)
        out: Tensor = x + self.down_proj(functional.silu(self.gate_proj(y)) * self.up_proj(y))
        return out


class Decoder(nn.Module):
    """The complete network, with tied input and output embeddings.

    Embeddings start large, so the outputs of the layers do not drown the identity of a token. The
    weight of the last norm starts small to compensate in the logits.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size)
        size = config.head_dim or config.hidden_size // config.num_attention_heads
        inverse = 10000.0 ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(config.max_position_embeddings), inverse)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        nn.init.normal_(self.embed.weight, std=1.0)
        nn.init.constant_(self.norm.weight, 0.06)
        for name, weight in self.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                gain = 0.2 if "o_proj" in name or "down_proj" in name else 1.0
                nn.init.normal_(weight, std=gain * weight.shape[1] ** -0.5)
        self._start_with_copying()
        self.start_with_matching()

    def _start_with_copying(self) -> None:
        """Initialize the first head of each layer, the guided head, to copy the attended token."""
        with torch.no_grad():
            for index, layer in enumerate(self.layers):
                assert isinstance(layer, Layer)
                gain = 0.6 if index == 3 else 0.3
                layer.o_proj.weight[:, : layer.size] = gain * layer.v_proj.weight[: layer.size].T

    def start_with_matching(self) -> None:
        """Initialize the third head of the fourth layer to attend from a word to other occurrences.

        Only the slowly rotating dimensions of the head take part, so distance has little effect,
        and only directions in which words of one kind differ.
        """
        layer = self.layers[3]
        assert isinstance(layer, Layer)
        half, size = layer.size // 2, layer.size
        slow = [*range(half - 7, half), *range(size - 7, size)]
        group = 2 // (layer.heads // layer.kv)
        with torch.no_grad():
            common = torch.linalg.svd(self.embed.weight, full_matrices=False).Vh[:16]
            free = torch.randn(len(slow), common.shape[1])
            free = torch.linalg.qr((free - free @ common.T @ common).T).Q.T
            layer.q_proj.weight[2 * size : 3 * size] = 0.0
            layer.q_proj.weight[[2 * size + d for d in slow]] = 2.3 * free
            layer.k_proj.weight[[group * size + d for d in slow]] = 2.3 * free

    def forward(self, prefix: Tensor, rows: Tensor, wanted: Tensor, keep: bool) -> Tensor:
        """Compute logits.

        Args:
            prefix: Common tokens before every row.
            rows: Further tokens of each row, `[rows, tokens]`.
            wanted: Boolean mask of the row tokens with needed logits.
            keep: Whether to keep the attention of the layers.

        Returns:
            Logits `[wanted tokens, vocabulary]`.
        """
        shape = (len(prefix), rows.shape[0], rows.shape[1])
        count = shape[0] + shape[2]
        x = self.embed(torch.cat((prefix, rows.flatten())))
        kind = torch.bfloat16 if torch.is_autocast_enabled("cpu") else x.dtype
        x = x.to(kind)
        cos, sin = self.get_buffer("cos")[:count], self.get_buffer("sin")[:count]
        mask = torch.full((count, count), float("-inf"), dtype=kind).triu(1)
        for layer in self.layers:
            x = layer(x, shape, (cos.to(kind), sin.to(kind), mask), keep)
        x = self.norm(x[shape[0] :].view(*rows.shape, -1)[wanted])
        logits: Tensor = x @ self.embed.weight.to(kind).T
        return logits

    def export(self) -> dict[str, Tensor]:
        """Return the parameters under the names used by transformers."""
        found = {}
        for name, weight in self.named_parameters():
            parts = name.split(".")
            if parts[0] == "layers" and parts[2].endswith("_proj"):
                block = "self_attn" if parts[2][:2] in ("q_", "k_", "v_", "o_") else "mlp"
                parts.insert(2, block)
            name = ".".join(parts).replace("embed.", "embed_tokens.")
            found[f"model.{name}"] = weight.detach().float()
        return found

    def load_exported(self, state: dict[str, Tensor]) -> None:
        """Load parameters from the output of `export`."""
        mine = dict(self.named_parameters())
        with torch.no_grad():
            for name, weight in state.items():
                short = name.removeprefix("model.").replace("embed_tokens.", "embed.")
                short = short.replace("self_attn.", "").replace("mlp.", "")
                mine[short].copy_(weight)
