from pathlib import Path

import office
from agents import Agent, Runner, RunState, function_tool
from openai_agents_model import model

FILE = Path("run.json")


@function_tool
def find_address(name: str) -> str:
    """Find a person's mail address."""
    return office.look_up(name)


@function_tool(needs_approval=True)
def send_mail(to: str, text: str) -> str:
    """Send a mail."""
    return office.deliver(to, text)


agent = Agent("desk", model=model, tools=[find_address, send_mail])


async def ask() -> None:
    result = await Runner.run(agent, "Tell Ada that the build is green")
    FILE.write_text(result.to_state().to_string())
    for call in result.interruptions:
        print("waiting:", call.name, call.arguments)


async def approve() -> None:
    state = await RunState.from_string(agent, FILE.read_text())
    for call in state.get_interruptions():
        state.approve(call)
    result = await Runner.run(agent, state)
    FILE.write_text(result.to_state().to_string())
    print(result.final_output)
