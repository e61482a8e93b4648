"""Trains the demo model's tokenizer: byte-level BPE with a token for every value.

The chat template saved with the tokenizer is the only definition of the prompt format; training,
evaluation and use all render the template. A space follows each special token, so a word has the
same token in an answer and within a note; the decoder removes the space at the beginning of an
answer.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tierkv.compute.demo_model import data, words
from tierkv.compute.demo_model.phrasings import INSTRUCTION, SHORT, SYSTEM, make_head

FOLDER = Path(__file__).parents[2] / "compute" / "demo_model" / "weights"
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SYSTEM_END, USER, ASSISTANT = "<sep>", "<q>", "<a>"
SPECIAL = (PAD, BOS, EOS, SYSTEM_END, USER, ASSISTANT)
CHAT_TEMPLATE = (
    "{%- macro text(content) -%}"
    "{%- if content is string -%}{{ content | trim }}"
    "{%- else -%}{%- for part in content -%}{{ part.text | trim }}{%- endfor -%}{%- endif -%}"
    "{%- endmacro -%}"
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}{{ '<q> ' + text(message.content) }}"
    "{%- elif message.role == 'assistant' -%}"
    "{{ '<a> ' + text(message.content) + eos_token }}"
    "{%- else -%}{{ ' ' + text(message.content) + '<sep>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<a>' }}{%- endif -%}"
)


def training_texts(count: int) -> Iterator[str]:
    """Yield the texts for learning the merges."""
    values = [*words.FIRST, *words.LAST, *words.CITY, *words.JOB, *words.PLAN, *words.PRODUCT]
    values += [*words.CATEGORIES, *words.PET, *words.COLOR, *words.DRINK, *words.MONTH, *words.DAY]
    values += [*words.GOOD, *words.BAD, *words.SENTIMENTS, *words.TOPICS, "yes", "no"]
    for _ in range(1000):
        yield " " + " ".join(values)
        yield " " + " ".join([INSTRUCTION, *SHORT, *SYSTEM])
    rng = random.Random(7)
    for index in range(count):
        conversation = data.sample_conversation(rng, make_head(rng, 0.0), index / count)
        for message in conversation.messages():
            yield " " + message["content"]


def train_tokenizer(vocabulary: int, count: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer.

    Args:
        vocabulary: Number of tokens, including bytes and special tokens.
        count: Number of conversations for learning the merges.

    Returns:
        The tokenizer, with special tokens and chat template set.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(training_texts(count), trainer)
    wrap: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerFast = wrap(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM_END, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    return wrapped


def main() -> None:
    """Train the tokenizer and save it into the folder of the weights."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--count", type=int, default=6000)
    options = parser.parse_args()
    tokenizer = train_tokenizer(options.vocabulary, options.count)
    tokenizer.save_pretrained(options.out, save_jinja_files=False)
    print(f"{len(tokenizer)} tokens written to {options.out}")


if __name__ == "__main__":
    main()
