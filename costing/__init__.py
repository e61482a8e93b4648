"""What loading and computing cost, and which of them is worth it: pure."""
