"""Pure cost models of loading and computing KV, and the decisions that follow from the costs."""
