"""The engine: a loop that plans, computes, samples and delivers."""
