"""vLLM and SGLang as engines of TierKV: they store KV in the pool and answer AI calls.

vLLM and SGLang load ``integrations/vllm`` and ``integrations/sglang`` into their own processes and
environments, through the interfaces of the engines. Modules for both engines lie directly in this
folder. ``integrations/remote`` is a compute node that sends its requests to another engine.
``integrations/events`` reports the content of an engine's own cache to the directory.
docs/engines.md is the manual.
"""
