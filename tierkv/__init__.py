"""TierKV: SQL with AI calls over a KV cache that all machines share."""
