"""An MCP server on the official SDK, as a program, whose tools try what a sandbox must refuse.

They return the name of the system's error, because the SDK does not pass the text of an exception on.
"""

import errno
import socket
from pathlib import Path

from mcp.server import MCPServer

server = MCPServer("prober")


def name_of(problem: OSError) -> str:
    return errno.errorcode.get(problem.errno or 0, repr(problem))


@server.tool()
def read(path: str) -> str:
    """Read a file."""
    try:
        return Path(path).read_text()
    except OSError as problem:
        return name_of(problem)


@server.tool()
def write(path: str) -> str:
    """Write a file, and read it."""
    try:
        Path(path).write_text("written")
        return Path(path).read_text()
    except OSError as problem:
        return name_of(problem)


@server.tool()
def connect(port: int) -> str:
    """Open a TCP connection."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            return "connected"
    except OSError as problem:
        return name_of(problem)


if __name__ == "__main__":
    server.run()
