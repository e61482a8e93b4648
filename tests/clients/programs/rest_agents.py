"""Agents of two frameworks: a loop that calls a tool of its own, and an answer of a type."""

import os
from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from agents import set_tracing_disabled as without_tracing
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from rest_steps import QUESTION, said

URL = os.environ["TIERKV_URL"]
asked = []


@function_tool
def lookup(kind: Literal["order", "city"]) -> str:
    """Look up a case."""
    asked.append(kind)
    return f"The {kind} is known."


without_tracing(True)
client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none")
once = ModelSettings(
    temperature=0, max_tokens=100, tool_choice="required", parallel_tool_calls=False
)
agent = Agent(
    name="clerk",
    instructions="Look up the case, then answer.",
    tools=[lookup],
    model_settings=once,
)
for name, kind in (("chat", OpenAIChatCompletionsModel), ("responses", OpenAIResponsesModel)):
    asked.clear()
    agent.model = kind(model="tierkv-demo", openai_client=client)
    result = Runner.run_sync(agent, QUESTION, max_turns=4)
    said(f"openai-agents {name} calls", len(asked))
    said(f"openai-agents {name} answers", bool(result.final_output))


class City(BaseModel):
    """Where a customer lives."""

    city: Literal["Vienna", "Rome"]


provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
model = OpenAIChatModel("tierkv-demo", provider=provider)
settings = {"temperature": 0, "max_tokens": 100, "parallel_tool_calls": False}
said("pydantic-ai answers", PydanticAgent(model).run_sync(QUESTION, model_settings=settings).output)
typed = PydanticAgent(model, output_type=City)
said("pydantic-ai type", type(typed.run_sync(QUESTION, model_settings=settings).output).__name__)
