"""Which calls have an answer that may be kept, and the key of their answers.

Pure. Model and revision, namespace and version, prompt, options and the group of callers all change
the key. Keys are made with the secret of the namespace, so a key says nothing about the prompt.

A key alone can't tell which answers a forgotten prompt begins. Each answer therefore has marks:
short keyed hashes of the prompt's first tokens, at lengths that grow by a quarter. A forgotten
prompt is looked for at the longest of these lengths within the prompt. All prompts that begin with
the forgotten prompt have this mark; so do prompts that differ only in the last fifth.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from tierkv.dbfront.contracts import PreparedCall, TextAnswer
from tierkv.kvcore.call_options import AnswerScope
from tierkv.kvcore.errors import UserError
from tierkv.kvcore.ids import NamespaceKey
from tierkv.kvcore.limits import MAX_CONTEXT_TOKENS
from tierkv.kvcore.request import GenerateRequest, SamplingParams

_KEY_BYTES: Final = 16
MARK_BYTES: Final = 4
"""A mark of another prompt is equal by chance once in 2**32; the answer is then computed again."""


def _mark_lengths() -> Iterator[int]:
    length = 1
    while length <= MAX_CONTEXT_TOKENS:
        yield length
        length = max(length + 1, length * 5 // 4)


MARK_LENGTHS: Final = tuple(_mark_lengths())


@dataclass(frozen=True, slots=True, order=True)
class PromptMark:
    """A mark of a prompt to forget.

    Attributes:
        at: position among an answer's marks, by MARK_LENGTHS.
        mark: MARK_BYTES bytes.
    """

    at: int
    mark: bytes

    @property
    def text(self) -> str:
        """Return the mark as text; ``of_text`` reads it."""
        return f"{self.at}.{self.mark.hex()}"

    @classmethod
    def of_text(cls, text: str) -> PromptMark:
        """Return the mark of ``text``.

        Raises:
            ValueError: the text is no mark.
        """
        at, _, mark = text.partition(".")
        return cls(int(at), bytes.fromhex(mark))

    def is_in(self, marks: bytes) -> bool:
        """Return True if an answer with these marks may be of the prompt."""
        start = MARK_BYTES * self.at
        return marks[start : start + MARK_BYTES] == self.mark


def prompt_marks(namespace_key: NamespaceKey, token_ids: Sequence[int]) -> bytes:
    """Return the marks of a prompt, one after the other."""
    hashed = blake2b(digest_size=MARK_BYTES, key=namespace_key, person=b"tierkv prompt")
    marks: list[bytes] = []
    done = 0
    for length in MARK_LENGTHS:
        if length > len(token_ids):
            break
        hashed.update(array("q", token_ids[done:length]))
        marks.append(hashed.digest())
        done = length
    return b"".join(marks)


def last_mark(namespace_key: NamespaceKey, token_ids: Sequence[int]) -> PromptMark | None:
    """Return the mark by which the answers of a prompt are found; None without tokens."""
    marks = prompt_marks(namespace_key, token_ids)
    if not marks:
        return None
    return PromptMark(len(marks) // MARK_BYTES - 1, marks[-MARK_BYTES:])


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """Key of a call's answer.

    Attributes:
        digest: 16 bytes; equal only for equal calls of those who share answers.
        lasts: whether the answer may outlive the process; answers of a session do not.
        most_age_s: age up to which an answer serves this call; 0.0: any age.
        request: the call's request; None only in tests of the cache alone.
    """

    digest: bytes
    lasts: bool
    most_age_s: float
    request: GenerateRequest | None = field(default=None, repr=False, compare=False)

    def marks(self) -> bytes:
        """Return the marks of the prompt; takes microseconds, so only kept answers get them."""
        if self.request is None:
            return b""
        return prompt_marks(self.request.namespace_key, self.request.token_ids)


def answer_key(prepared: PreparedCall) -> AnswerKey | None:
    """Return the key of a call's answer; None if the call asks for a new answer.

    Only repeatable answers have a key: greedy or with a seed, and not blended. A call with
    ``cache => false`` wants a computed answer. Kept answers have no log-probabilities, so a call
    for them is always computed.
    """
    call, request = prepared.call, prepared.request
    scope = call.options.answer_cache or AnswerScope.OFF
    if scope is AnswerScope.OFF or not request.use_cache or request.blend is not None:
        return None
    if call.tools is not None:
        return None  # Answers are kept as text, and their calls have identifiers of their own.
    sampling = request.sampling
    if sampling.logprobs is not None:
        return None
    asks = bool(call.labels) or call.embed
    if sampling.temperature > 0.0 and sampling.seed is None and not asks:
        return None
    owner = ""
    if scope is not AnswerScope.NAMESPACE:
        owner = call.tenant
    if scope is AnswerScope.SESSION:
        owner = f"{call.tenant} {call.session}"
    digest = blake2b(digest_size=_KEY_BYTES, key=request.namespace_key)
    asked = (
        scope.value,
        owner,
        prepared.model.identity,
        sampling.temperature,
        sampling.top_p,
        sampling.max_tokens,
        sampling.stop_token_ids,
        sampling.seed if sampling.temperature > 0.0 else None,
        sampling.ignore_eos,
        _shape(sampling),
        () if call.labels else call.options.stop or (),
        request.guide,
        call.labels,
        call.embed,
    )
    digest.update(repr(asked).encode("utf-8", "surrogatepass"))
    digest.update(array("q", request.token_ids))
    return AnswerKey(
        digest.digest(), scope is not AnswerScope.SESSION, call.options.answer_ttl_s or 0.0, request
    )


def _shape(sampling: SamplingParams) -> tuple[object, ...]:
    """Return the fields that change the distribution of the tokens."""
    if not sampling.shapes:
        return ()
    drawn = sampling.temperature > 0.0
    return (
        sampling.top_k if drawn else 0,
        sampling.min_p if drawn else 0.0,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
        sampling.logit_bias,
        sampling.min_tokens,
    )


def may_keep(answer: TextAnswer) -> bool:
    """Return whether an answer equals the answer without any cache: no lossy KV, no blending."""
    usage = answer.usage
    return not usage.blended_tokens and not (usage.hit_tokens.total and usage.kv_codec.is_lossy)


def check_scope(scope: AnswerScope | None, session: str) -> None:
    """Refuse answers for a session to a call without one.

    Raises:
        UserError: says what to send.
    """
    if scope is AnswerScope.SESSION and not session:
        raise UserError(
            "answer_cache = session needs a session",
            hint="Send session_id with the request, or use answer_cache = tenant.",
        )
