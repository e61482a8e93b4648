"""Measures the demo model: exact match per task on held-out examples, decoded greedily.

One-document tasks use the prompt format of a SQL query: one user message with the long instruction.
The remaining tasks are asked in the tenth turn of a chat about several notes. The names and the
combinations of facts never occur in training.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tierkv.compute.demo_model.data import PROBE_TASKS, Probe, make_probes
from tools.demo_model.tokenizer import FOLDER


class Answerer:
    """The model with its tokenizer, answering chats greedily."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def answer(
        self, chats: Sequence[Sequence[dict[str, str]]], batch: int = 16, length: int = 12
    ) -> list[str]:
        """Answer the last message of each chat.

        Args:
            chats: Messages of each chat; the last message is the user's.
            batch: Number of chats per batch.
            length: Maximum number of answer tokens.

        Returns:
            The answers in the order of the chats.
        """
        prompts = [
            self.tokenizer.apply_chat_template(
                list(chat), tokenize=False, add_generation_prompt=True
            )
            for chat in chats
        ]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answers = [""] * len(prompts)
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            encoded = self.tokenizer(
                [prompts[index] for index in part],
                add_special_tokens=False,
                padding=True,
                return_tensors="pt",
                return_token_type_ids=False,
            )
            with torch.inference_mode():
                out = self.model.generate(**encoded, max_new_tokens=length, do_sample=False)
            texts = self.tokenizer.batch_decode(
                out[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True
            )
            for index, text in zip(part, texts, strict=True):
                answers[index] = text
        return answers


def exact_match(answerer: Answerer, probes: Sequence[Probe]) -> dict[str, float]:
    """Return per task the share of probes with an exactly correct answer."""
    answers = answerer.answer([probe.messages for probe in probes])
    right: dict[str, list[bool]] = {}
    for probe, answer in zip(probes, answers, strict=True):
        right.setdefault(probe.task, []).append(answer == probe.answer)
    return {task: sum(found) / len(found) for task, found in right.items()}


def main() -> None:
    """Print exact match per task."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--count", type=int, default=100, help="examples per task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tasks", nargs="*", choices=PROBE_TASKS, default=list(PROBE_TASKS))
    parser.add_argument("--format", choices=("text", "json"), default="text")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    probes = make_probes(options.tasks, options.count, options.seed)
    scores = exact_match(Answerer(options.model), probes)
    if options.format == "json":
        result = {"count": options.count, "seed": options.seed, "exact_match": scores}
        print(json.dumps(result, indent=2))
        return
    print(f"{'task':24} {'exact match':>11}   ({options.count} examples per task)")
    for task, score in scores.items():
        print(f"{task:24} {score:11.3f}")


if __name__ == "__main__":
    main()
