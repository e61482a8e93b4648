"""How a prepared call becomes text: from the events of the dispatcher to the events of an answer.

dbfront/generation/generation.py uses one ``TextAnswering`` for all calls. Tokens become text, stop
strings end an answer early, and questions about a prompt (labels, embeddings) are read out.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from tierkv.dbfront.accounts.ended_call import CallEnd, ModelRequest
from tierkv.dbfront.answer_token import AnswerToken
from tierkv.dbfront.contracts import PreparedCall, TextCall, TextEvent
from tierkv.dbfront.generation.labels import Labels
from tierkv.dbfront.generation.readouts import Submit, read_label, read_out, walk_labels
from tierkv.dbfront.tokens.detokenizer import Detokenizer, StopStrings, TokenReport, TokenSpelling
from tierkv.dbfront.tokens.tokenizer import TextTokenizer
from tierkv.dbfront.tool_calls.call_format import CallFormat
from tierkv.dbfront.tool_calls.reader import CallReader, Reading
from tierkv.dbfront.tool_calls.tool import CallDelta
from tierkv.kvcore.clock import Clock
from tierkv.kvcore.errors import NodeLostError
from tierkv.kvcore.node import ModelInfo
from tierkv.kvcore.request import FinishReason, GenerateEvent, Usage
from tierkv.scheduler.dispatcher import Dispatcher

USAGE_WAIT_S = 2.0
"""Time limit for the usage report of the node after a stop string ended an answer."""


class TextAnswering:
    """Answers prepared calls; ``events`` yields text and, last, how the answer ended."""

    def __init__(self, dispatcher: Dispatcher, clock: Clock, labels: Labels) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._labels = labels

    def events(
        self, live: ModelRequest, tokenizer: TextTokenizer
    ) -> AsyncGenerator[TextEvent, None]:
        """Ask the model of a prepared call; see TextGenerator.stream.

        Args:
            live: the request; its progress, usage and end are recorded here.
            tokenizer: the model's own.
        """
        call = live.prepared.call
        asks = bool(call.labels) or call.embed
        return self._readout(live, tokenizer) if asks else self._text_events(live, tokenizer)

    async def _text_events(
        self, live: ModelRequest, tokenizer: TextTokenizer
    ) -> AsyncGenerator[TextEvent, None]:
        prepared = live.prepared
        text = AnswerText(prepared, tokenizer)
        submitted = self._dispatcher.submit(
            prepared.request, model=prepared.model, preferred_node=prepared.preferred_node
        )
        async with aclosing(submitted) as events:
            async for event in events:
                if event.token_ids:
                    self._count(live, event)
                    for piece in text.push(event):
                        if piece:
                            yield piece.to_event(event.node_id)
                        if piece.stop:
                            last = await self._stop(live, events)
                            yield self._last(live, FinishReason.STOP, last, piece.stop)
                            return
                if event.finish_reason is not None:
                    piece = text.flush(cut=event.finish_reason is FinishReason.LENGTH)
                    if piece:
                        yield piece.to_event(event.node_id)
                    reason = FinishReason.STOP if piece.stop else event.finish_reason
                    yield self._last(live, reason, event, piece.stop)
                    return
        raise NodeLostError("the answer ended without an end")  # The dispatcher prevents this case.

    async def _readout(
        self, live: ModelRequest, tokenizer: TextTokenizer
    ) -> AsyncGenerator[TextEvent, None]:
        """Answer a question about the prompt: with a label, or with an embedding."""
        prepared = live.prepared
        walk = None
        if prepared.call.labels and prepared.model.score_refusal:
            async with aclosing(self._guided_label(live, tokenizer)) as guided:
                async for label in guided:
                    yield label
            return
        if prepared.call.labels:
            walk = await self._labels.walk(prepared.call, prepared.model, tokenizer)
            event = await walk_labels(prepared, walk, self._submit_to(prepared.model))
        else:
            event = await read_out(prepared, self._submit_to(prepared.model))
        live.ttft_s, live.node_id = self._clock.now() - live.started_s, event.node_id
        last = self._last(live, event.finish_reason or FinishReason.STOP, event)
        if walk is None:
            yield replace(last, embedding=event.embedding)
        elif event.finish_reason is not FinishReason.STOP:
            yield last
        else:
            yield TextEvent(prepared.call.labels[walk.best], node_id=event.node_id)
            yield replace(last, label_probabilities=walk.chances)

    async def _guided_label(
        self, live: ModelRequest, tokenizer: TextTokenizer
    ) -> AsyncGenerator[TextEvent, None]:
        """Answer with the label generated by the model; its probability is 1, all others are 0."""
        labels, parts = live.prepared.call.labels, []
        async with aclosing(self._text_events(live, tokenizer)) as events:
            async for event in events:
                parts.append(event.text)
                if event.finish_reason is FinishReason.CANCELLED:
                    yield event
                elif event.finish_reason is not None:
                    cut = event.finish_reason is not FinishReason.STOP
                    best = read_label("".join(parts), labels, cut=cut)
                    yield TextEvent(labels[best], node_id=event.node_id)
                    chances = tuple(float(number == best) for number in range(len(labels)))
                    yield replace(
                        event, finish_reason=FinishReason.STOP, label_probabilities=chances
                    )

    def _submit_to(self, model: ModelInfo) -> Submit:
        return lambda request, node: self._dispatcher.submit(
            request, model=model, preferred_node=node
        )

    def _count(self, live: ModelRequest, event: GenerateEvent) -> None:
        if not live.completion_tokens:
            live.ttft_s = self._clock.now() - live.started_s
        live.completion_tokens += len(event.token_ids)
        live.node_id = event.node_id

    async def _stop(
        self, live: ModelRequest, events: AsyncGenerator[GenerateEvent, None]
    ) -> GenerateEvent | None:
        """Cancel the request at its node and wait briefly for its usage, for correct hit tokens."""
        last: GenerateEvent | None = None
        await self._dispatcher.cancel(live.prepared.request.request_id)
        try:
            async with asyncio.timeout(USAGE_WAIT_S):
                async for event in events:
                    last = event
        except TimeoutError:
            return None
        return last

    def _last(
        self,
        live: ModelRequest,
        reason: FinishReason,
        event: GenerateEvent | None,
        stop: str = "",
    ) -> TextEvent:
        request = live.prepared.request
        usage = event.usage if event is not None else None
        usage = usage or Usage(len(request.token_ids), live.completion_tokens)
        cut = reason is FinishReason.STOP and not usage.counted_there
        if cut and live.completion_tokens < usage.completion_tokens:
            usage = replace(usage, completion_tokens=live.completion_tokens)
        live.usage = usage
        live.end = CallEnd(reason.value)
        if event is not None and not live.node_id:
            live.node_id = event.node_id  # An empty answer has no other event.
        if event is not None and event.ttft_s and _is_one_of_many(live.prepared.call):
            live.ttft_s = event.ttft_s
        return TextEvent(
            finish_reason=reason,
            usage=usage,
            ttft_s=live.ttft_s,
            total_s=self._clock.now() - live.started_s,
            node_id=live.node_id,
            stop=stop,
        )


def _is_one_of_many(call: TextCall) -> bool:
    """Return True for a statement's calls, whose time to first token is measured at the node.

    The time that a call waits in the front behind earlier calls says nothing about a node or its
    cache. A walk over labels sends several requests, so its time is measured at the front.
    """
    return not call.origin and not call.labels


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text, then pieces of calls, then the stop string that ended the answer, if any.

    ``tokens`` are those of the text and the calls, if the call asks for log-probabilities.
    """

    text: str = ""
    calls: tuple[CallDelta, ...] = ()
    stop: str = ""
    tokens: tuple[AnswerToken, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.calls or self.tokens)

    def to_event(self, node_id: str) -> TextEvent:
        """Return the event for the client."""
        return TextEvent(self.text, node_id=node_id, calls=self.calls, tokens=self.tokens)


class AnswerText:
    """The text of one answer. Stop strings count behind the first ``min_tokens`` tokens only."""

    def __init__(self, prepared: PreparedCall, tokenizer: TextTokenizer) -> None:
        call, sampling = prepared.call, prepared.request.sampling
        self._report = None
        if sampling.logprobs is not None:
            self._report = TokenReport(TokenSpelling(tokenizer.tokenizer))
        self._unstoppable = sampling.min_tokens
        self._reader = None
        decode = tokenizer.decode
        if call.tools is not None:
            form = tokenizer.template.call_format
            names = frozenset(tool.name for tool in call.tools.callable)
            self._reader = CallReader(form, names, _new_call_id)
            decode = partial(tokenizer.decode_with, shown=_shown(form, tokenizer))
        self._text = Detokenizer(decode)
        self._stops = StopStrings(() if call.labels else call.options.stop or ())

    def push(self, event: GenerateEvent) -> list[TextPiece]:
        """Add tokens; return what is certain now. Nothing follows a piece with ``stop``."""
        if self._report is None and self._unstoppable <= 0:
            return [self._piece(self._read(self._text.push(event.token_ids)))]
        pieces = []
        for place, token_id in enumerate(event.token_ids):
            text = self._text.push((token_id,))
            if self._report is not None:
                self._report.add(token_id, event.logprobs[place], gained=len(text))
            free, self._unstoppable = self._unstoppable > 0, self._unstoppable - 1
            read = self._read(text)
            piece = TextPiece(read.text, read.calls) if free else self._piece(read)
            pieces.append(replace(piece, tokens=self._tokens_of(piece)))
            if piece.stop:
                break
        return pieces

    def _tokens_of(self, piece: TextPiece) -> tuple[AnswerToken, ...]:
        """Return the tokens to show with a piece.

        With tools every token is shown at once: the text of a call has no place in the answer's.
        """
        if self._report is None:
            return ()
        return self._report.shown(len(piece.text)) if self._reader is None else self._report.rest()

    def flush(self, *, cut: bool) -> TextPiece:
        """Return the rest, at the end of the answer."""
        read = self._read(self._text.flush())
        rest = "" if self._reader is None else self._reader.flush(cut=cut).text
        piece = self._piece(Reading(read.text + rest, read.calls))
        if piece.stop:
            return replace(piece, tokens=self._tokens_of(piece))
        tokens = () if self._report is None else self._report.rest()
        return TextPiece(piece.text + self._stops.flush(), piece.calls, tokens=tokens)

    def _read(self, text: str) -> Reading:
        return Reading(text) if self._reader is None else self._reader.push(text)

    def _piece(self, read: Reading) -> TextPiece:
        cut = self._stops.push(read.text)
        if cut.stop:
            return TextPiece(cut.text, stop=cut.stop)
        text = cut.text + self._stops.flush() if read.calls else cut.text
        return TextPiece(text, read.calls)


def _shown(form: CallFormat, tokenizer: TextTokenizer) -> dict[int, str]:
    """Return the special tokens that are part of a format."""
    parts = (*form.head, *form.middle, *form.tail, *(form.separator or ()))
    written = " ".join(part for part in parts if isinstance(part, str))
    return {i: name for name, i in tokenizer.plain_text.special_ids.items() if name in written}


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
