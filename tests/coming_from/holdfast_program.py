import office
from holdfast_model import model

from holdfast import Agent, Approve, Runtime, tool

STORE = "sqlite:///desk.db"


@tool
def find_address(name: str) -> str:
    """Find a person's mail address."""
    return office.look_up(name)


@tool(approval="required")
def send_mail(to: str, text: str) -> str:
    """Send a mail."""
    return office.deliver(to, text)


agent = Agent("desk", model=model, tools=[find_address, send_mail])


def ask() -> None:
    result = agent.run_sync("Tell Ada that the build is green", store=STORE)
    for pending in result.pending:
        print("waiting:", pending.tool, pending.args)


async def approve() -> None:
    async with Runtime(agent, store=STORE) as rt:
        for pending in await rt.pending():
            await rt.resolve(pending, Approve(), by="boss")
            print((await rt.wait(pending.conversation)).text)
