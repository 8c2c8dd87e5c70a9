"""A store whose file is deleted while a caller waits: one log message, and an error for the caller."""

import asyncio
import logging

from support.async_tests import until
from support.revival import agent

from holdfast import Runtime, ScriptedModel, ToolCall, tool
from holdfast.errors import StoreError


@tool(executor="human", prompt="Which one?")
def choose() -> str:
    """Ask the user."""
    raise NotImplementedError


def test_a_deleted_store_is_logged_once_without_a_traceback_and_fails_the_waiting_caller(tmp_path, caplog):
    """The store is polled all the time; the same failure is not logged again."""
    path = tmp_path / "a.db"

    async def main():
        async with Runtime(agent(ScriptedModel([[ToolCall("choose")]]), choose), store=f"sqlite:///{path}") as rt:
            turn = await rt.send("c", "go")
            await turn.result()
            waiting = asyncio.ensure_future(turn.final_result())
            engine, failures = rt._engine, []
            report_failure = engine.faults.report_failure
            engine.faults.report_failure = lambda what, failure: (failures.append(what), report_failure(what, failure))
            path.rename(tmp_path / "kept-a.db")  # its -wal file stays, or the store would stop for good
            problem = (await asyncio.gather(waiting, return_exceptions=True))[0]
            assert isinstance(problem, StoreError)
            assert "deleted, moved or replaced" in problem.message
            await until(lambda: len(failures) > 5)
            (tmp_path / "kept-a.db").rename(path)
            await until(lambda: any("answers again" in record.message for record in caplog.records))

    with caplog.at_level(logging.INFO, "holdfast"):
        asyncio.run(asyncio.wait_for(main(), 60))
    messages = [record for record in caplog.records if "deleted, moved or replaced" in record.getMessage()]
    assert len(messages) == 1, [record.getMessage() for record in messages]
    assert not any(record.exc_info for record in caplog.records)
