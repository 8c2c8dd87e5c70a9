"""An agent that reads mails, drafts replies, and asks before it sends one: `python triage.py`."""

import asyncio
import hashlib
import json
import os
import smtplib
from email import message_from_bytes, policy
from email.message import EmailMessage
from email.utils import formatdate, parseaddr
from pathlib import Path
from textwrap import indent
from typing import Any

from holdfast import Agent, Approve, Call, Deny, Pending, Runtime, ScriptedModel, Stale, ToolCall, ToolError, tool
from holdfast.models import Request

INBOX = Path(os.environ.get("INBOX", Path(__file__).parent / "inbox"))
STORE = os.environ.get("HOLDFAST_STORE", "sqlite:///triage.db")
SMTP_PORT = int(os.environ.get("SMTP_PORT", "8025"))


@tool
def read_mail(file: str) -> dict[str, str]:
    """Read a mail of the inbox."""
    mail = load_mail(file)
    return {"from": str(mail["From"]), "subject": str(mail["Subject"]), "text": text_of(mail)}


@tool(approval="required", prompt="Send this reply?")
def send_reply(file: str, text: str, call: Call) -> str:
    """Reply to a mail of the inbox."""
    reply = write_reply(file, text, call)
    reply["Date"] = formatdate()
    try:
        with smtplib.SMTP("127.0.0.1", SMTP_PORT) as server:
            server.send_message(reply)
    except ConnectionRefusedError:
        raise ToolError("resource_missing", f"no mail server listens on port {SMTP_PORT}") from None
    return f"sent to {reply['To']}"


@send_reply.preview
def preview_reply(file: str, text: str, call: Call) -> dict[str, str]:
    """Show the mail that would be sent. It has no date: the approval is bound to exactly what is shown."""
    reply = write_reply(file, text, call)
    return {name: str(reply[name]) for name in ("From", "To", "Subject")} | {"Text": text_of(reply)}


def write_reply(file: str, text: str, call: Call) -> EmailMessage:
    """Return the reply. Its Message-ID is made from `call.key`: a mail that is sent twice is recognised as one."""
    mail = load_mail(file)
    reply = EmailMessage()
    reply["From"] = "desk@shop.example"
    reply["To"] = parseaddr(str(mail["Reply-To"] or mail["From"]))[1]
    reply["Subject"] = f"Re: {mail['Subject']}"
    reply["In-Reply-To"] = reply["References"] = str(mail["Message-ID"])
    reply["Message-ID"] = f"<{hashlib.sha256(call.key.encode()).hexdigest()[:32]}@shop.example>"
    reply.set_content(text)
    return reply


def load_mail(file: str) -> EmailMessage:
    """Return a mail of the inbox. The model chooses the name, so its directories are ignored."""
    path = INBOX / Path(file).name
    if not path.is_file():
        raise ToolError("not_found", f"the inbox has no mail {file!r}")
    return message_from_bytes(path.read_bytes(), EmailMessage, policy=policy.default)


def list_mails() -> list[str]:
    """Return the names of the files in the inbox."""
    return sorted(path.name for path in INBOX.glob("*.eml"))


def text_of(mail: EmailMessage) -> str:
    """Return the plain text of a mail."""
    body = mail.get_body(("plain",))
    return str(body.get_content()).strip() if body else ""


# --- the model: three functions in place of a language model, so that the example needs no API key ---


def open_mail(request: Request) -> list[ToolCall]:
    return [ToolCall("read_mail", {"file": request.messages[0].text.removeprefix("New mail: ")})]


def draft_reply(request: Request) -> str | list[ToolCall]:
    file = request.messages[0].text.removeprefix("New mail: ")
    mail: dict[str, str] = json.loads(request.messages[-1].text)["result"]
    name = parseaddr(mail["from"])[0].split()[0]
    if "unsubscribe" in mail["text"].lower():
        return "A newsletter: it needs no reply."
    if "invoice" in mail["subject"].lower():
        text = f"Dear {name},\n\nthank you. We have passed your invoice on to accounting.\n\nYour shop"
    else:
        text = f"Dear {name},\n\nwe are sorry. Your parcel is on its way and arrives on Friday.\n\nYour shop"
    return [ToolCall("send_reply", {"file": file, "text": text})]


def report(request: Request) -> str:
    outcome: dict[str, Any] = json.loads(request.messages[-1].text)
    return f"Answered: {outcome['result']}." if outcome["ok"] else f"Not answered: {outcome['error']['message']}"


agent = Agent(
    "triage",
    model=ScriptedModel([open_mail, draft_reply, report], follow=True),
    tools=[read_mail, send_reply],
    instructions="Read the mail that you are told about. Reply to it if a customer or a supplier waits for an answer.",
)


# --- the program ---


async def triage(rt: Runtime, mail: str, known: set[str]) -> str:
    """Have a mail read, unless an earlier run of this program did, and return what came of it."""
    conversation = f"mail-{mail}"
    if conversation in known:
        result = await rt.wait(conversation)
    else:
        result = await rt.run(f"New mail: {mail}", conversation=conversation)
    return f"{mail}: {'a reply waits for you' if result.waiting else result.text}"


def ask(pending: Pending) -> Approve | Deny | None:
    """Show the mail and return the person's decision; None leaves the question for later."""
    print(f"\n{pending.prompt}")
    for name, value in pending.preview.items():
        print(indent(f"{name}: {value}", "  "))
    match input("[y]es, [n]o, or Enter for later: "):
        case "y":
            return Approve()
        case "n":
            return Deny("the person who answers mails said no")
        case _:
            return None


async def main() -> None:
    async with Runtime(agent, store=STORE) as rt:
        known = {info.conversation for info in await rt.conversations(limit=10_000)}
        print(*await asyncio.gather(*(triage(rt, mail, known) for mail in list_mails())), sep="\n")
        for pending in await rt.pending():
            if decision := ask(pending):
                try:
                    await rt.resolve(pending, decision, by="desk")
                    print((await rt.wait(pending.conversation)).text)
                except Stale as problem:  # answered elsewhere in the meantime
                    print(problem)


if __name__ == "__main__":
    asyncio.run(main())
