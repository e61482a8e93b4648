"""An answer without a token: it is known all the same who gave it."""

from __future__ import annotations

from pathlib import Path

from tests.fix_scheduler import EOS
from tests.fix_text import running_front, text_call, write_model_folder
from tierkv.dbfront.contracts import Message
from tierkv.kvcore.request import FinishReason


async def test_the_node_of_an_empty_answer_is_known(tmp_path: Path) -> None:
    async with running_front(write_model_folder(tmp_path)) as front:
        front.node.vocabulary = (EOS,)
        call = text_call(messages=(Message("user", "Is it good?"),))
        answer = await front.generation.answer(await front.generation.prepare(call))
        assert (answer.text, answer.finish_reason) == ("", FinishReason.STOP)
        assert answer.node_id == front.node.info.node_id
