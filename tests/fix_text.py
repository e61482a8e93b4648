"""A model folder with a byte-level tokenizer, and a front over fake nodes that speak ASCII."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tests.fix_meta import BreakableMeta, join
from tests.fix_scheduler import EOS, FakeCompute, make_info, make_model
from tierkv.dbfront.contracts import TextCall
from tierkv.dbfront.generation.generation import Generation
from tierkv.kvcore.call_options import USUAL, CallOptions
from tierkv.kvcore.node import ModelInfo, NodeInfo
from tierkv.scheduler.config import SchedulerConfig
from tierkv.scheduler.dispatcher import Dispatcher
from tierkv.scheduler.nodes.cluster_view import ClusterView

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUICK = SchedulerConfig(refresh_interval_s=0.05, backoff_initial_s=0.01, node_wait_s=0.2)
SPECIALS = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]


def text_call(**fields: Any) -> TextCall:
    """Make a call from its own fields and from those of its options, which are else the usual."""
    options = {name: fields.pop(name) for name in CallOptions.__slots__ if name in fields}
    return TextCall(**fields, options=replace(USUAL, **options))


def byte_tokenizer() -> Tokenizer:
    """One token per byte, five special ones before them; id 1 ends an answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    assert tokenizer.token_to_id("</s>") == EOS
    return tokenizer


def write_model_folder(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write the files the front reads."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class Front:
    """Generation over one or more fake nodes."""

    def __init__(self, *infos: NodeInfo, config: SchedulerConfig = QUICK) -> None:
        self.meta = BreakableMeta()
        letters = [byte_tokenizer().token_to_id(c) for c in "abcdefghijklmnopqrstuvwxyzĠ"]
        self.nodes = {i.node_id: FakeCompute(i, vocabulary=letters) for i in infos}
        self.dispatcher = Dispatcher(
            ClusterView(meta=self.meta, connect=lambda info: self.nodes[info.node_id]),
            meta=self.meta,
            config=config,
        )
        self.generation = Generation(self.dispatcher)

    @property
    def node(self) -> FakeCompute:
        """The first node."""
        return next(iter(self.nodes.values()))


@asynccontextmanager
async def running_front(
    folder: Path, *infos: NodeInfo, config: SchedulerConfig = QUICK
) -> AsyncIterator[Front]:
    """Start a front; without infos over one node that serves ``tiny``."""
    infos = infos or (make_info("c1", models=(text_model(folder),)),)
    front = Front(*infos, config=config)
    for node in front.nodes.values():
        await join(front.meta, node.info)
    await front.dispatcher.start()
    try:
        yield front
        front.dispatcher.state.check_invariants()
        assert not front.dispatcher.state.requests
        assert not front.generation.live
    finally:
        await front.dispatcher.stop()
        await front.meta.close()


def text_model(folder: Path, name: str = "tiny", **changes: object) -> ModelInfo:
    """A served model whose tokenizer is in ``folder``."""
    return make_model(name, folder=str(folder), **changes)
