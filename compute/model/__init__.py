"""The decoder in torch: weights, paged attention, rotary positions, pages of KV."""
