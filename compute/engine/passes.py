"""Forward passes: whole steps, passes behind loads and blending passes.

Used by the engine's loop only, in the engine's thread. The batcher decides which tokens a pass
computes; compute/engine/requests.py learns which tokens were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierkv.compute.batching.answers import draw_for, read_out
from tierkv.compute.batching.batch_plan import Chunk, PageCopy
from tierkv.compute.batching.sampler import Sampler, logprobs_of
from tierkv.compute.blend.run import BlendRun
from tierkv.compute.engine.drafts import verified
from tierkv.compute.engine.requests import LiveRequests
from tierkv.compute.engine.wiring import EngineParts
from tierkv.compute.model.batch import ChunkInput, ForwardBatch, RawTarget, build_batch
from tierkv.compute.model.decoder import Outputs
from tierkv.compute.transfers.loads import BehindLoad
from tierkv.compute.transfers.saves import NOTHING_SAVED, PassSave


class ForwardPasses:
    """Runs the model over chunks, and applies the results to the chunks' requests.

    Attributes:
        steps: passes so far that chose tokens.
    """

    def __init__(self, parts: EngineParts, requests: LiveRequests) -> None:
        self.steps = 0
        self._model = parts.model
        self._config = parts.config
        self._clock = parts.clock
        self._report = parts.report
        self._drafts = parts.drafts
        self._inbox = parts.inbox
        self._loads = parts.loads
        self._saves = parts.saves
        self._blends = parts.blends
        self._requests = requests
        self._sampler = Sampler()

    def copy_parts(self, copies: Sequence[PageCopy]) -> None:
        """Copy parts of blocks from page to page, in this order."""
        for copy in copies:
            self._model.pages.copy_part(copy.source, copy.target, copy.tokens)

    def run(self, chunks: Sequence[Chunk], fresh_pages: Sequence[int]) -> None:
        """Compute a step's chunks, or begin a chunk behind a load."""
        if fresh_pages:
            self._model.pages.clear(fresh_pages)
        if chunks[0].loading:
            self._begin_behind_load(chunks[0])
        else:
            self._compute(chunks)

    def _compute(self, chunks: Sequence[Chunk]) -> None:
        """Compute chunks together, save newly full blocks, and apply the chosen tokens."""
        began = self._clock.now()
        batch = self._batch(chunks)
        saving = self._saves.begin(chunks)
        try:
            outputs = self._forward(batch, saving)
            rows = self._choose([chunks[i] for i in batch.logit_chunks], outputs)
            chosen: list[list[int | None]] = [[] for _ in chunks]
            for i, token in zip(batch.logit_chunks, rows, strict=True):
                chosen[i].append(token)
            follow = [self._drafts.checked(*pair) for pair in zip(chunks, chosen, strict=True)]
            self._report.measured(chunks, sum(map(len, follow)), self._clock.now() - began)
            for chunk, tokens in zip(chunks, follow, strict=True):
                self._requests.advance(chunk, tokens, saving)
        finally:
            saving.end()

    def _batch(self, chunks: Sequence[Chunk]) -> ForwardBatch:
        inputs = [_chunk_input(chunk) for chunk in chunks]
        device = self._model.pages.kv.device
        return build_batch(inputs, block_tokens=self._config.block_tokens, device=device)

    def _forward(self, batch: ForwardBatch, saving: PassSave) -> Outputs:
        if not saving.follows:
            return self._model.compute(batch)
        steps = self._model.layer_steps(batch)
        while True:
            try:
                saving.computed(next(steps))
            except StopIteration as end:
                saving.computed(self._model.arch.layers)
                outputs: Outputs = end.value
                return outputs

    def _choose(self, chunks: Sequence[Chunk], outputs: Outputs) -> list[int | None]:
        """Choose a token per row, and read out the answers of requests about a prompt."""
        self.steps += 1
        for row, seq in enumerate(chunk.seq for chunk in chunks):
            if seq.request.reads_out:
                hidden, logits = outputs.hidden[row], outputs.logits[row]
                seq.readout = read_out(seq.request, hidden=hidden, logits=logits)
        tokens = self._sampler.sample(outputs.logits, [draw_for(chunk.seq) for chunk in chunks])
        self._report_logprobs(chunks, outputs, tokens)
        return tokens

    def _report_logprobs(
        self, chunks: Sequence[Chunk], outputs: Outputs, tokens: Sequence[int | None]
    ) -> None:
        """Keep the log-probabilities of chosen tokens for the events of requests that ask."""
        asked = [
            (row, chunk.seq, token, top)
            for row, (chunk, token) in enumerate(zip(chunks, tokens, strict=True))
            if (top := chunk.seq.request.sampling.logprobs) is not None and token is not None
        ]
        if not asked:
            return
        rows, seqs, chosen, tops = zip(*asked, strict=True)
        entries = logprobs_of(outputs.logits[list(rows)], chosen, tops)
        for seq, entry in zip(seqs, entries, strict=True):
            seq.logprobs = (entry,)

    def _begin_behind_load(self, chunk: Chunk) -> None:
        steps = self._model.layer_steps(self._batch([chunk]))
        self._loads.behind[chunk.seq.seq_id].begin(chunk, steps, self._saves.begin([chunk]))

    def go_on_behind(self, loading: BehindLoad) -> None:
        """Compute the arrived layers behind a load, at most one pass over the model as in any step.

        Messages wait for the pass as for any step. Stopping after each layer to handle messages
        made the first call of a batch the last to answer, at a layer per step of the remaining
        calls.
        """
        while (chunk := loading.chunk) is not None and loading.can_go_on:
            outputs = loading.go_on()
            if outputs is not None:
                self._end_behind_load(loading, chunk, outputs)
                return

    def _end_behind_load(self, loading: BehindLoad, chunk: Chunk, outputs: Outputs) -> None:
        good, saving = loading.job.good, loading.take_saving()
        try:
            self._loads.settle(loading, good)
            if good == len(loading.order.pages):  # Else the same tokens are planned again.
                tokens = self._choose([chunk] if chunk.samples else [], outputs)
                self._requests.advance(chunk, verified((), tokens), saving)
        finally:
            saving.end()

    def blend(self, run: BlendRun, used_tokens: int) -> None:
        """Compute as many layers of a blending pass as the step's token budget has left."""
        left = (self._config.max_batch_tokens - used_tokens) * self._model.arch.layers
        for _ in range(max(1, left // run.chunk.count)):
            outcome = self._blends.go_on(run)
            if outcome is not None:
                tokens = self._choose([run.chunk], outcome.outputs)
                self._blends.finish(run, outcome)
                self._requests.computed_tokens -= outcome.reused_tokens - outcome.recomputed_tokens
                self._requests.advance(run.chunk, verified((), tokens), NOTHING_SAVED)
                return
            if self._blends.ready is not run or self._inbox.waiting:
                return


def _chunk_input(chunk: Chunk) -> ChunkInput:
    """Describe a chunk for the model; a chunk in isolation leaves its KV a second time."""
    seq = chunk.seq
    token_ids = seq.tokens[chunk.start : chunk.start + chunk.count]
    if chunk.draft:
        token_ids = np.append(token_ids, chunk.draft)
    raw = RawTarget(seq.raw_start, seq.raw_pages) if seq.is_background else None
    wanted = chunk.samples + len(chunk.draft)
    return ChunkInput(token_ids, chunk.start, seq.page_table, wanted, raw)
