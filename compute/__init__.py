"""A prefill/decode node: a small torch engine over paged KV; the only room that imports torch."""
