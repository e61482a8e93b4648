"""Engines that are not ours: vLLM and SGLang keep their KV in our pool, and answer our calls.

``integrations/vllm`` and ``integrations/sglang`` are loaded by these engines, in their processes
and their environments, through the interfaces they offer; what both need of the pool lies beside
them here. ``integrations/remote`` is a compute node that has another engine answer,
``integrations/events`` tells the directory what such an engine holds in its own cache.
docs/engines.md says how to use all that.
"""
