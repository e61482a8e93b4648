"""Trains the demo model on a CPU within a given time.

The loss is the loss of the answers, plus a small loss of the text before the answers. During the
first part of the training a guidance loss is added, which directs the attention of one or two heads
in each of five layers; with guidance the lookup circuit forms in minutes instead of hours.
Checkpoints are written during the training.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from tools.demo_model.examples import Batch, stream
from tools.demo_model.network import Decoder
from tools.demo_model.tokenizer import FOLDER

EMBEDDING_RATE = 4.0


def make_config(vocabulary: int, width: int, layers: int, inner: int) -> LlamaConfig:
    """Return the configuration; heads have 32 dimensions and share keys."""
    heads = width // 32
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    return config


def save(network: Decoder, folder: Path) -> None:
    """Write the weights in the format of transformers, in bfloat16."""
    make_model: Any = LlamaForCausalLM
    make_generation: Any = GenerationConfig
    model = make_model(network.config)
    model.load_state_dict(network.export(), strict=False)
    model.generation_config = make_generation(
        bos_token_id=1, eos_token_id=2, pad_token_id=0, do_sample=False
    )
    model.to(torch.bfloat16).save_pretrained(folder)


def guidance_loss(network: Decoder, batch: Batch) -> Tensor:
    """Return the guidance loss: small if the guided heads attend to their targets."""
    total = torch.zeros(())
    for (layer, head), looks in batch.looks.items():
        attention = network.layers[layer].attention
        if isinstance(attention, Tensor):
            row, query, key = looks.unbind(0)
            group = attention.shape[2]
            picked = attention[row, head // group, head % group, query, key]
            total = total - picked.float().clamp_min(1e-6).log().mean()
    return total


def step_loss(
    network: Decoder, batch: Batch, guide: float, context: float
) -> tuple[Tensor, Tensor, float]:
    """Return the training loss, the loss of the answers and the share of correct answer tokens."""
    answers, real = batch.answers[:, 1:], batch.real[:, 1:]
    wanted = answers | (real & (torch.rand(real.shape) < 0.15))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = network(batch.prefix, batch.rows[:, :-1], wanted, guide > 0)
    target, is_answer = batch.rows[:, 1:][wanted], answers[wanted]
    loss = functional.cross_entropy(logits.float(), target, reduction="none")
    of_answers = loss[is_answer].mean()
    of_context = loss[~is_answer].mean() if (~is_answer).any() else of_answers.detach() * 0
    total = of_answers + context * of_context
    if guide > 0:
        total = total + guide * guidance_loss(network, batch)
    right = (logits.argmax(-1) == target)[is_answer].float().mean().item()
    return total, of_answers.detach(), right


def learning_rate(step: int, done: float) -> float:
    """Return the factor of the learning rate: a short warm-up, then a decay in the last half."""
    return min(1.0, (step + 1) / 60) * min(1.0, max(0.02, (1 - done) / 0.5))


def make_optimizer(network: Decoder) -> torch.optim.Optimizer:
    """Return the optimizer; embeddings are large and therefore take larger steps."""
    other = [weight for name, weight in network.named_parameters() if "embed" not in name]
    groups = [
        {"params": other, "factor": 1.0, "weight_decay": 0.01},
        {"params": [network.embed.weight], "factor": EMBEDDING_RATE, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def train(options: argparse.Namespace) -> None:
    """Train for the given time and write checkpoints."""
    tokenizer: Any = AutoTokenizer.from_pretrained(options.tokenizer)
    network = Decoder(make_config(len(tokenizer), options.width, options.layers, options.inner))
    if options.start_from:
        network.load_exported(load_file(options.start_from / "model.safetensors"))
        if options.new_matching:
            network.start_with_matching()
    optimizer = make_optimizer(network)
    size = sum(p.numel() for p in network.parameters())
    print(f"{size} parameters", flush=True)
    start, step, seen, sums = time.time(), 0, 0, [0.0, 0.0]

    def progress() -> float:
        share = (time.time() - start) / (60 * options.minutes)
        return float(options.progress + (1 - options.progress) * share)

    rng = random.Random(options.seed)
    for batch in stream(tokenizer, rng, progress, options.tokens):
        done = progress()
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = options.rate * learning_rate(step, done) * group["factor"]
        guide = options.guide * min(1.0, max(0.0, (0.85 - done) / 0.3))
        total, loss, right = step_loss(network, batch, guide, options.context)
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + len(batch.prefix) + batch.rows.numel()
        sums = [sums[0] + loss.item(), sums[1] + right]
        if step % 100 == 0:
            spent = time.time() - start
            print(
                f"step {step} time {spent:.0f}s tokens {seen / 1e6:.2f}M ({seen / spent:.0f}/s) "
                f"done {done:.2f} loss {sums[0] / 100:.3f} right {sums[1] / 100:.3f}",
                flush=True,
            )
            sums = [0.0, 0.0]
        if step % 500 == 0:
            save(network, options.out)
    save(network, options.out)


def main() -> None:
    """Train the demo model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--tokenizer", type=Path, default=FOLDER)
    parser.add_argument("--start-from", type=Path, help="folder of weights to go on with")
    parser.add_argument("--new-matching", action="store_true", help="start that head afresh")
    parser.add_argument("--progress", type=float, default=0.0, help="where the schedule begins")
    parser.add_argument("--minutes", type=float, default=46)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--inner", type=int, default=384)
    parser.add_argument("--tokens", type=int, default=3072, help="tokens of rows per batch")
    parser.add_argument("--rate", type=float, default=0.001)
    parser.add_argument("--guide", type=float, default=0.5)
    parser.add_argument("--context", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    train(options)


if __name__ == "__main__":
    main()
