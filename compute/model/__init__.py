"""The decoder in torch: weights, paged attention, rotary positions and the L1 pages of KV."""
