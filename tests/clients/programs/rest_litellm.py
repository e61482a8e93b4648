"""LiteLLM with its OpenAI and Anthropic providers: answers, streams, usage, tools, embeddings."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
from rest_steps import QUESTION, said

URL = os.environ["TIERKV_URL"]
RULES = {"type": "text", "text": "Be kind. " * 60, "cache_control": {"type": "ephemeral"}}
PARAMETERS = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": PARAMETERS}}]

litellm.suppress_debug_info = True
for provider, base in (("openai", f"{URL}/v1"), ("anthropic", URL)):
    usual = {
        "model": f"{provider}/tierkv-demo",
        "api_base": base,
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 80,
        "messages": [{"role": "system", "content": [RULES]}, {"role": "user", "content": QUESTION}],
    }
    for turn in ("first", "second"):
        answer = litellm.completion(**usual)
        said(f"{provider} {turn}", answer.choices[0].message.content)
    said(f"{provider} cached", answer.usage.prompt_tokens_details.cached_tokens > 100)
    chunks = litellm.completion(**usual, stream=True, stream_options={"include_usage": True})
    text = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    said(f"{provider} stream", "".join(text))
    call = (
        litellm.completion(**usual, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        .choices[0]
        .message.tool_calls[0]
    )
    said(f"{provider} call", [call.function.name, sorted(json.loads(call.function.arguments))])

vector = litellm.embedding(
    model="openai/tierkv-demo", api_base=f"{URL}/v1", api_key="none", input=["Vienna"]
)
said("embedding", len(vector.data[0]["embedding"]))
