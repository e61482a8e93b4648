"""SQL text to plan, pure: classify statements, find AI calls, rewrite them."""
