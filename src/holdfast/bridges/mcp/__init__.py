"""The Model Context Protocol (MCP), in both directions, on the official SDK: ``pip install 'holdfast[mcp]'``.

The client side gives an agent the tools of MCP servers: ``Agent(tools=[MCP("https://...", name="crm")])``.

    toolset.py      ``MCP``: the source of tools; reads the list, keeps it up to date
    definition.py   a tool of a server as a tool of ours: its name, schema, approval and recovery
    offers.py       resources and prompts as tools, if they are asked for
    exchange.py     one call: requests, input rounds, tasks and live questions
    question.py     a server's questions as one question to a person, and the answer for the server
    result.py       a server's result as ours
    connection.py   the session with one server: connects, reconnects, reports what went wrong
    http.py         the HTTP transport: bounded, and errors of the network as errors of one request
    stdio.py        the transport to a program's standard input and output
    watchdog.py     a program of its own: ends the server's processes when its starter dies
    config.py       targets from the command line and from ``.mcp.json``

The server side (``server.py`` and the modules named after it) offers an agent to MCP clients.
"""

from holdfast.bridges.mcp.toolset import MCP

__all__ = ["MCP"]
