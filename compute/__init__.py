"""A prefill and decode node: our own engine, with the model in torch over paged KV."""
