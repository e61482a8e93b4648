"""Engines that are not ours: vLLM and SGLang keep their KV in our pool, and answer our calls.

``engines/vllm`` and ``engines/sglang`` are loaded by these engines, in their processes and their
environments, through the interfaces they offer; what both need of the pool lies beside them here.
``engines/remote`` is a compute node that has another engine answer, ``engines/events`` tells the
directory what such an engine holds in its own cache. docs/engines.md says how to use all that.
"""
