"""Requests inside the engine, each from arrival to last event.

Used by the engine's loop only, in the engine's thread. A computed chunk goes in, deliveries to
callers come out. Each request ends exactly once: finished, failed or cancelled.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from tierkv.compute.batching.answers import Delivery, last_event, refusal
from tierkv.compute.batching.batch_plan import Chunk
from tierkv.compute.batching.logit_edits import LogitEdits
from tierkv.compute.batching.sequence import AnswerForm, Phase, Sequence, make_sequence
from tierkv.compute.engine.wiring import EngineParts
from tierkv.compute.transfers.saves import PassSave
from tierkv.kvcore.errors import TierKVError
from tierkv.kvcore.layout import KvCodec
from tierkv.kvcore.request import FinishReason, GenerateEvent, GenerateRequest

_log = logging.getLogger(__name__)


class LiveRequests:
    """Sequences in the engine, and deliveries not yet handed to callers.

    Attributes:
        sequences: by number; includes the chunk in isolation while it is computed.
        computed_tokens: tokens whose KV was computed here, ever.
    """

    def __init__(self, parts: EngineParts, *, eos_token_ids: Collection[int]) -> None:
        self.sequences: dict[int, Sequence] = {}
        self.computed_tokens = 0
        self._config = parts.config
        self._eos = frozenset(eos_token_ids)
        self._clock = parts.clock
        self._batcher = parts.batcher
        self._tiers = parts.tiers
        self._loads = parts.loads
        self._blends = parts.blends
        self._isolation = parts.isolation
        self._handoffs = parts.handoffs
        self._saves = parts.saves
        self._drafts = parts.drafts
        self._out = parts.out

    @property
    def unfinished(self) -> set[int]:
        """Sequences whose last event was not delivered."""
        return {*self.sequences, *self._handoffs.seq_ids}

    def take_deliveries(self) -> list[Delivery]:
        """Return the deliveries for callers, and forget them."""
        deliveries = self._out.copy()
        self._out.clear()
        return deliveries

    def begin(
        self, seq_id: int, request: GenerateRequest, arrival_s: float, form: AnswerForm | None
    ) -> None:
        """Queue a request; a request for no tokens ends at once."""
        seq = make_sequence(
            seq_id, request, arrival_s=arrival_s, block_tokens=self._config.block_tokens, form=form
        )
        if request.sampling.edits_logits:
            seq.edits = LogitEdits(request, () if form is not None else self._stops(seq))
        self.sequences[seq_id] = seq
        complete = form is not None and form.complete
        if complete or (seq.length >= seq.max_length and not request.reads_out):
            seq.phase = Phase.ENDED
            self._finish(seq, (), FinishReason.STOP if complete else FinishReason.LENGTH)
            return
        if request.handoff:
            self._handoffs.begin(seq)
        self._blends.consider(seq)
        self._batcher.add(seq)

    def begin_background(self) -> None:
        """Have the batcher compute the wanted chunks in isolation, in turn."""
        current = self._isolation.current
        if current is not None and current.phase is Phase.ENDED:
            self._isolation.put_back()  # Callers' sequences needed the pages.
            self.drop(current)
        current = self._isolation.begin_next()
        if current is not None:
            self.sequences[current.seq_id] = current

    def advance(self, chunk: Chunk, tokens: tuple[int, ...], saving: PassSave) -> None:
        """Apply a computed chunk: save full blocks, deliver new tokens, end the sequence."""
        seq = chunk.seq
        if chunk.samples and (error := refusal(seq, finite=bool(tokens))) is not None:
            self.fail(seq, error)
            return
        reads_out = chunk.samples and seq.request.reads_out
        outcome = self._batcher.computed(chunk, () if reads_out else tokens, self._stops(seq))
        if chunk.samples and (error := refusal(seq, finite=True)) is not None:
            self.fail(seq, error)  # The chosen token does not fit the form after all.
            return
        self.computed_tokens += seq.computed - chunk.start
        if not saving.keep(seq, outcome):
            self._saves.save(seq, outcome.full_blocks)
        if seq.is_background and seq.computed == seq.length:
            self._saves.save(seq, self._isolation.computed())
            self.drop(seq)
            return
        if tokens and seq.first_token_s < 0:
            seq.first_token_s = self._clock.now()
        if reads_out:
            self._finish(seq, (), FinishReason.STOP)
        else:
            self._answer(seq, outcome.new_tokens, outcome.finish)

    def _answer(
        self, seq: Sequence, new_tokens: tuple[int, ...], finish: FinishReason | None
    ) -> None:
        """Deliver new tokens, together with the last event if the answer ends here."""
        if new_tokens and finish in (None, FinishReason.HANDOFF):
            event = GenerateEvent(new_tokens, node_id=self._config.node_id, logprobs=seq.logprobs)
            self._out.append(Delivery(seq.seq_id, event))
            new_tokens = ()  # A handoff's last event waits for the pool; the token does not.
        if finish is not None:
            self._finish(seq, new_tokens, finish)

    def _stops(self, seq: Sequence) -> frozenset[int]:
        """Return the tokens that end an answer; with a form these always include the end token."""
        sampling = seq.request.sampling
        stops = frozenset(sampling.stop_token_ids)
        return stops if sampling.ignore_eos and seq.form is None else stops | self._eos

    def _finish(self, seq: Sequence, new_tokens: tuple[int, ...], reason: FinishReason) -> None:
        """End a sequence with its last event; the last event of a handoff waits for the blocks."""
        event = last_event(
            seq,
            new_tokens,
            reason,
            node_id=self._config.node_id,
            now=self._clock.now(),
            codec=self._tiers.codec_of(seq.request) or KvCodec.NONE,
        )
        self.drop(seq)
        if reason is FinishReason.HANDOFF and self._handoffs.finish(seq.seq_id, event):
            return
        self._handoffs.forget(seq.seq_id)
        self._out.append(Delivery(seq.seq_id, event))

    def fail(self, seq: Sequence, error: TierKVError) -> None:
        """End a sequence with an error."""
        self.drop(seq)
        self._handoffs.forget(seq.seq_id)
        self._out.append(Delivery(seq.seq_id, error))

    @contextmanager
    def failing(self, chunks: Iterable[Chunk]) -> Iterator[None]:
        """Fail the chunks' requests if computing the chunks raises; the node continues."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises ends these requests.
            _log.exception("a step failed")
            for chunk in chunks:
                if chunk.seq.seq_id in self.sequences:
                    message = f"internal error while computing: {error}"
                    self.fail(chunk.seq, TierKVError(message))

    def cancel(self, seq_id: int) -> None:
        """End a sequence as cancelled; ignored if the sequence has ended before."""
        handed_over = self._handoffs.forget(seq_id)
        seq = self.sequences.get(seq_id) or handed_over
        if seq is not None:
            self._finish(seq, (), FinishReason.CANCELLED)

    def fail_all(self, error: TierKVError) -> None:
        """Tell every caller that the engine is broken, and change no other state."""
        self._out.extend(Delivery(seq_id, error) for seq_id in self.unfinished)

    def drop(self, seq: Sequence) -> None:
        """Take a sequence out of every part of the engine, and release the pages."""
        self.sequences.pop(seq.seq_id, None)
        self._loads.forget(seq.seq_id)
        self._blends.forget(seq.seq_id)
        self._drafts.forget(seq.seq_id)
        counts = seq.request.use_cache and not seq.is_background
        if counts and seq.started_s >= 0 and seq.phase is not Phase.ENDED:
            prompt = seq.prompt_length - seq.request.resumed_tokens
            self._tiers.count_prompt(prompt, seq.hit_tokens())
        self._batcher.end(seq)
        self._isolation.ended(seq)
