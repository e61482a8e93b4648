"""How KV becomes smaller at the edge of L1: one Protocol, and the codecs behind it."""
