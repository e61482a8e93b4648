"""What L1 holds, in page numbers and tokens: pure bookkeeping below the batcher and the tiers."""
