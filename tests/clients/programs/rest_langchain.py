"""LangChain through its OpenAI and Anthropic packages: answers, streams, tools, typed answers."""

import os
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from rest_steps import QUESTION, said

URL = os.environ["TIERKV_URL"]


@tool
def lookup(kind: Literal["order", "city"]) -> str:
    """Look up a case."""
    return f"The {kind} is known."


class City(BaseModel):
    """Where a customer lives."""

    city: Literal["Vienna", "Rome"]


usual = {"model": "tierkv-demo", "temperature": 0, "max_tokens": 60, "api_key": "none"}
for name, chat in (
    ("openai", ChatOpenAI(base_url=f"{URL}/v1", **usual)),
    ("anthropic", ChatAnthropic(base_url=URL, **usual)),
):
    said(f"{name} answer", chat.invoke(QUESTION).text)
    said(f"{name} stream", "".join(chunk.text for chunk in chat.stream(QUESTION)))
    called = chat.bind_tools([lookup], tool_choice="lookup").invoke(QUESTION)
    said(f"{name} calls", [(call["name"], sorted(call["args"])) for call in called.tool_calls])
    talk = [HumanMessage(QUESTION), called]
    talk += [ToolMessage(lookup.invoke(c["args"]), tool_call_id=c["id"]) for c in called.tool_calls]
    said(f"{name} after the call", bool(chat.bind_tools([lookup]).invoke(talk).text))
    said(f"{name} structure", type(chat.with_structured_output(City).invoke(QUESTION)).__name__)

embeddings = OpenAIEmbeddings(
    base_url=f"{URL}/v1", model="tierkv-demo", api_key="none", check_embedding_ctx_length=False
)
said("embedding", len(embeddings.embed_query("Vienna")))
