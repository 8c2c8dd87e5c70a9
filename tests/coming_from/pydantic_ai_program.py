from pathlib import Path

import office
from pydantic_ai import Agent, ConversationTypeAdapter, DeferredToolRequests
from pydantic_ai_model import model

FILE = Path("conversation.json")
agent = Agent(model, output_type=[str, DeferredToolRequests])


@agent.tool_plain
def find_address(name: str) -> str:
    """Find a person's mail address."""
    return office.look_up(name)


@agent.tool_plain(requires_approval=True)
def send_mail(to: str, text: str) -> str:
    """Send a mail."""
    return office.deliver(to, text)


def ask() -> None:
    result = agent.run_sync("Tell Ada that the build is green")
    FILE.write_bytes(ConversationTypeAdapter.dump_json(result.conversation))
    if isinstance(result.output, DeferredToolRequests):
        for call in result.output.approvals:
            print("waiting:", call.tool_name, call.args_as_dict())


def approve() -> None:
    conversation = ConversationTypeAdapter.validate_json(FILE.read_bytes())
    if requests := conversation.deferred_tool_requests:
        decisions = requests.build_results(approve_all=True)
        result = agent.run_sync(conversation=conversation, deferred_tool_results=decisions)
        FILE.write_bytes(ConversationTypeAdapter.dump_json(result.conversation))
        print(result.output)
