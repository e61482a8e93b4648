"""The parts of an engine, and the wiring between them.

Called once, by compute/node.py; nothing here runs later. Each part knows only parts below it:

    Engine                       the loop and its thread
      ForwardPasses              runs the model
      LiveRequests               what a computed chunk means for its caller
        Blends, Isolation        chunks of prompts, reused at other positions
          Loads, Prefetches, Saves, Handoffs
            Batcher   Tiers      what to compute; where KV is. Neither knows the other
              PagePool
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv.compute.batching.answers import Delivery
from tierkv.compute.batching.batcher import Batcher
from tierkv.compute.batching.inbox import Inbox
from tierkv.compute.blend.isolation import Isolation
from tierkv.compute.blend.stage import Blends
from tierkv.compute.config import ComputeConfig
from tierkv.compute.engine.drafts import Drafts
from tierkv.compute.engine.step_costs import LoadReport
from tierkv.compute.l1.page_pool import PagePool
from tierkv.compute.model.decoder import Decoder
from tierkv.compute.tiers.tiers import Tiers
from tierkv.compute.transfers.handoff import Handoffs
from tierkv.compute.transfers.loads import Loads
from tierkv.compute.transfers.prefetch import Prefetches
from tierkv.compute.transfers.saves import Saves
from tierkv.kvcore.clock import Clock
from tierkv.policies.select import make_policy


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of one engine. Other threads reach ``inbox`` and, in part, ``tiers``.

    Attributes:
        out: deliveries not yet handed to callers, oldest first.
    """

    config: ComputeConfig
    clock: Clock
    model: Decoder
    tiers: Tiers
    inbox: Inbox
    batcher: Batcher
    report: LoadReport
    drafts: Drafts
    loads: Loads
    prefetches: Prefetches
    handoffs: Handoffs
    saves: Saves
    isolation: Isolation
    blends: Blends
    out: list[Delivery] = field(default_factory=list)


def wire(
    config: ComputeConfig, model: Decoder, tiers: Tiers, clock: Clock, *, blend_refusal: str = ""
) -> EngineParts:
    """Make the parts of an engine.

    Args:
        config: configuration of the node.
        model: the model; its pages are L1.
        tiers: the memory below L1.
        clock: clock of the node.
        blend_refusal: why this model's chunks are never blended; empty if blending is allowed.
    """
    out: list[Delivery] = []
    inbox = Inbox()
    batcher = _batcher(config, model, tiers, clock)
    report = LoadReport(tiers.figures, config.max_batch_tokens)
    loads = Loads(batcher, tiers, inbox, clock=clock)
    handoffs = _handoffs(config, tiers, clock, out)
    isolation = _isolation(config, model, tiers, batcher)
    blends = Blends(
        batcher,
        tiers,
        loads,
        inbox,
        model,
        isolation,
        refusal=blend_refusal,
        clock=clock,
        timeout_s=config.load_timeout_s,
        prefill_rate=report.prefill_rate,
    )
    return EngineParts(
        config,
        clock,
        model,
        tiers,
        inbox,
        batcher,
        report,
        drafts=_drafts(config, model),
        loads=loads,
        prefetches=Prefetches(batcher, tiers, inbox, config),
        handoffs=handoffs,
        saves=Saves(batcher, tiers, handoffs, clock, enabled=config.publish),
        isolation=isolation,
        blends=blends,
        out=out,
    )


def _batcher(config: ComputeConfig, model: Decoder, tiers: Tiers, clock: Clock) -> Batcher:
    pages = model.pages.num_pages
    policy = make_policy(config.eviction_policy, pages - 1)
    return Batcher(
        PagePool(pages, policy, now=clock.now, wipe=model.pages.clear),
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        known=tiers.known,
    )


def _handoffs(config: ComputeConfig, tiers: Tiers, clock: Clock, out: list[Delivery]) -> Handoffs:
    return Handoffs(
        clock=clock,
        timeout_s=config.load_timeout_s,
        deliver=out.append,
        cache_errors=tiers.cache_errors,
    )


def _isolation(config: ComputeConfig, model: Decoder, tiers: Tiers, batcher: Batcher) -> Isolation:
    return Isolation(
        batcher,
        block_tokens=config.block_tokens,
        clear=model.pages.clear,
        must_wait=lambda: tiers.publisher.is_behind,
    )


def _drafts(config: ComputeConfig, model: Decoder) -> Drafts:
    pages = model.pages
    most = config.guesses_on(pages.kv.device.type, str(pages.layout.dtype))
    return Drafts(most, max_batch_tokens=config.max_batch_tokens)
