import office
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.tools import tool
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Command
from langgraph_model import model

FILE = "desk.db"
CONFIG = {"configurable": {"thread_id": "mail-1"}}


@tool
def find_address(name: str) -> str:
    """Find a person's mail address."""
    return office.look_up(name)


@tool
def send_mail(to: str, text: str) -> str:
    """Send a mail."""
    return office.deliver(to, text)


def make_agent(checkpointer: SqliteSaver):
    gate = HumanInTheLoopMiddleware(interrupt_on={"send_mail": True}, interrupt_mode="per_call")
    return create_agent(model, [find_address, send_mail], middleware=[gate], checkpointer=checkpointer)


def ask() -> None:
    message = {"role": "user", "content": "Tell Ada that the build is green"}
    with SqliteSaver.from_conn_string(FILE) as checkpointer:
        result = make_agent(checkpointer).invoke({"messages": [message]}, CONFIG)
        for interrupt in result.get("__interrupt__", []):
            print("waiting:", interrupt.value["name"], interrupt.value["args"])


def approve() -> None:
    with SqliteSaver.from_conn_string(FILE) as checkpointer:
        agent = make_agent(checkpointer)
        for interrupt in agent.get_state(CONFIG).interrupts:
            result = agent.invoke(Command(resume={interrupt.id: {"type": "approve"}}), CONFIG)
            print(result["messages"][-1].text)
