"""An agent that asks before it sends a mail.

Run `holdfast run hello:agent "Tell Ada the build is green"`, and approve from a second terminal.
"""

from holdfast import Agent, ScriptedModel, ToolCall, tool


@tool
def find_address(name: str) -> str:
    """Find somebody's mail address."""
    return f"{name.lower()}@example.org"


@tool(approval="required", prompt="Send this mail to {to}?")
def send_mail(to: str, text: str) -> str:
    """Send a mail."""
    return f"sent to {to}"


look = ToolCall("find_address", {"name": "Ada"})
send = ToolCall("send_mail", {"to": "ada@example.org", "text": "The build is green."})
agent = Agent("hello", model=ScriptedModel([[look], [send], "Bye."], follow=True), tools=[find_address, send_mail])
