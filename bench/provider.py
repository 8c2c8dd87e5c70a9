"""A fake provider that streams N words in Anthropic's or OpenAI's format, as fast as the client reads.

``python provider.py N`` serves on loopback, prints its port and ends with its standard input. The benchmark starts it
as a separate process, so that its CPU time is not measured.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@contextmanager
def serving(n: int) -> Iterator[str]:
    """Start the provider and yield its URL."""
    with subprocess.Popen([sys.executable, __file__, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


def anthropic(n: int) -> Iterator[str]:
    def event(type: str, **data: Any) -> str:
        return f"event: {type}\ndata: {json.dumps({'type': type, **data})}\n\n"

    usage = {"input_tokens": 10, "output_tokens": 1}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "claude-haiku-4-5", "content": [],
               "stop_reason": None, "stop_sequence": None, "usage": usage}  # fmt: skip
    yield event("message_start", message=message)
    yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    for _ in range(n):
        yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": "word "})
    yield event("content_block_stop", index=0)
    yield event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": n})
    yield event("message_stop")


def openai(n: int) -> Iterator[str]:
    def event(**data: Any) -> str:
        about = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "gpt-4o"}
        return f"data: {json.dumps({**about, **data})}\n\n"

    yield event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
    for _ in range(n):
        yield event(choices=[{"index": 0, "delta": {"content": "word "}, "finish_reason": None}])
    yield event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    yield event(choices=[], usage={"prompt_tokens": 10, "completion_tokens": n, "total_tokens": n + 10})
    yield "data: [DONE]\n\n"


async def serve(n: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
                size = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
                await reader.readexactly(size)
                writer.write(HEAD)
                for event in anthropic(n) if "/messages" in lines[0] else openai(n):
                    writer.write(f"{len(event):x}\r\n{event}\r\n".encode())
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
