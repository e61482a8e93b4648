"""The engine: one loop that plans, computes, samples and delivers."""
