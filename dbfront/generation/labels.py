"""Labels as the tokens that a model would answer with, checked and kept.

Used by dbfront/generation/generation.py. A statement asks thousands of prompts for the same labels,
so they are encoded once; how the likeliest is found is dbfront/generation/label_trie.py.
"""

from __future__ import annotations

from collections import OrderedDict

from tierkv.dbfront.contracts import TextCall
from tierkv.dbfront.generation.label_trie import LabelWalk, Spelling, needs_end
from tierkv.dbfront.tokens.tokenizer import TextTokenizer
from tierkv.kvcore import limits
from tierkv.kvcore.errors import UdfArgumentError
from tierkv.kvcore.node import ModelInfo

_KEPT = 64

_Key = tuple[str, str, bool, tuple[str, ...]]


class Labels:
    """Spellings by model and labels; belongs to one event loop."""

    def __init__(self) -> None:
        self._spelled: OrderedDict[_Key, tuple[Spelling, ...]] = OrderedDict()

    async def spellings(
        self, call: TextCall, model: ModelInfo, tokenizer: TextTokenizer
    ) -> tuple[Spelling, ...]:
        """Return the tokens of each of a call's labels, as they follow its prompt.

        Behind a conversation a label is written as the chat template writes answers; behind a raw
        prompt as it stands, a space before it included.

        Raises:
            UdfArgumentError: too many labels, equal ones, or one that has no tokens.
        """
        chat = call.messages is not None
        key = (model.folder, model.revision, chat, call.labels)
        if key not in self._spelled:
            check_labels(call.labels)
            if chat:
                spelled = tokenizer.encode_answers([label.strip() for label in call.labels])
            else:
                spelled = (await tokenizer.encode_parts(("", *map(tokenizer.plain, call.labels))))[
                    1:
                ]
            _check_spellings(call.labels, spelled, model)
            self._spelled[key] = tuple(spelled)
            if len(self._spelled) > _KEPT:
                self._spelled.popitem(last=False)
        self._spelled.move_to_end(key)
        return self._spelled[key]

    async def walk(self, call: TextCall, model: ModelInfo, tokenizer: TextTokenizer) -> LabelWalk:
        """Begin one prompt's walk through its labels; see ``spellings``."""
        return LabelWalk(await self.spellings(call, model, tokenizer), model.eos_token_ids)


def check_labels(labels: tuple[str, ...]) -> None:
    """Refuse too many labels, equal ones and empty ones.

    Raises:
        UdfArgumentError: which one, and why.
    """
    if len(labels) > limits.MAX_LABELS:
        raise UdfArgumentError(
            f"{len(labels)} labels were given, at most {limits.MAX_LABELS} are allowed"
        )
    seen: set[str] = set()
    for label in labels:
        if not label.strip():
            raise UdfArgumentError("a label is empty", hint="a model can't answer with nothing")
        if label in seen:
            raise UdfArgumentError(f"the label {label[:80]!r} is given twice")
        seen.add(label)


def _check_spellings(labels: tuple[str, ...], spellings: list[Spelling], model: ModelInfo) -> None:
    of: dict[Spelling, str] = {}
    for label, spelling in zip(labels, spellings, strict=True):
        if not spelling:
            raise UdfArgumentError(f"the label {label[:80]!r} has no token of model {model.name}")
        if spelling in of:
            raise UdfArgumentError(
                f"the labels {of[spelling][:80]!r} and {label[:80]!r} are the same to model "
                f"{model.name}"
            )
        of[spelling] = label
    if not model.eos_token_ids and needs_end(spellings):
        raise UdfArgumentError(
            f"one label begins with another, and model {model.name} has no token that ends an "
            "answer",
            hint="choose labels that differ earlier",
        )
