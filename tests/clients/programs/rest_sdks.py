"""The helpers of OpenAI's and Anthropic's libraries: parsed answers, streams, loops of tools."""

import os
from typing import Any, Literal

import anthropic
import openai
from pydantic import BaseModel
from rest_steps import QUESTION, said

URL = os.environ["TIERKV_URL"]
MODEL = "tierkv-demo"
ASK: list[Any] = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}


class City(BaseModel):
    """Where a customer lives."""

    city: Literal["Vienna", "Rome"]


TOOL = openai.pydantic_function_tool(City, name="lookup")
one = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
parsed = one.responses.parse(
    model=MODEL, input=QUESTION, text_format=City, max_output_tokens=60, temperature=0
)
said("openai parsed", type(parsed.output_parsed).__name__)

with one.chat.completions.stream(
    model=MODEL, messages=ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False,
    max_tokens=80, temperature=0,
) as stream:  # fmt: skip
    kinds = {event.type for event in stream}
    (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
said("openai tool stream", "tool_calls.function.arguments.done" in kinds)
said("openai tool arguments", type(call.function.parsed_arguments).__name__)

begun = one.responses.create(
    model=MODEL, input=QUESTION, background=True, stream=True, max_output_tokens=20,
    extra_body={"ignore_eos": True},
)  # fmt: skip
first = [event for event, _ in zip(begun, range(5), strict=False)]
begun.close()
seen = [event.sequence_number for event in first]
with one.responses.stream(response_id=first[0].response.id, starting_after=seen[-1]) as rest:
    seen += [event.sequence_number for event in rest]
said("openai resumed", seen == list(range(len(seen))))
counted = one.responses.input_tokens.count(model=MODEL, input=QUESTION)
said("openai counted", counted.input_tokens == parsed.usage.input_tokens)
try:
    one.responses.create(
        model=MODEL, input=[{"type": "function_call_output", "call_id": "a", "output": "b"}]
    )
except openai.BadRequestError as error:
    said("openai refused", error.param)

other = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
mark = {"cache_control": {"type": "ephemeral"}}
with other.messages.stream(
    model=MODEL, max_tokens=6, system=[{"type": "text", "text": "Be brief.", **mark}],
    messages=[{"role": "user", "content": [{"type": "text", "text": QUESTION, **mark}]}],
    extra_body=GREEDY,
) as told:  # fmt: skip
    said("anthropic stream", "".join(told.text_stream))
    said("anthropic stop", told.get_final_message().stop_reason)
shaped = other.messages.parse(
    model=MODEL, max_tokens=60, messages=ASK, output_format=City, extra_body=GREEDY
)
said("anthropic parsed", type(shaped.parsed_output).__name__)


@anthropic.beta_tool
def lookup(kind: Literal["order", "city"]) -> str:
    """Look up a case."""
    return f"The {kind} is known."


runner = other.beta.messages.tool_runner(
    model=MODEL, max_tokens=60, tools=[lookup], messages=ASK, extra_body=GREEDY
)
said("anthropic runner", runner.until_done().stop_reason)
said("anthropic models", [(model.id, model.display_name) for model in other.models.list()])
try:
    other.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": ""}])
except anthropic.BadRequestError as error:
    said("anthropic refused", "messages.0.content" in error.message)
