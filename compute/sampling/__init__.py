"""From logits to tokens: greedy, random, or held to a grammar."""
