"""A Flask application with an agent that asks before it sends a mail: `flask --app app run`."""

import os
import secrets

from flask import Flask, abort, jsonify, request, session

from holdfast import Agent, Approve, Deny, HoldfastError, Pending, ScriptedModel, ToolCall, TurnResult, blocking, tool


@tool(approval="required", prompt="Send this mail to {to}?")
def send_mail(to: str, text: str) -> str:
    """Send a mail."""
    return f"sent to {to}"


send = ToolCall("send_mail", {"to": "ada@example.org", "text": "The build is green."})
agent = Agent("desk", model=ScriptedModel([[send], "I have told Ada."], follow=True), tools=[send_mail])

runtime = blocking.Runtime(agent, store=os.environ.get("HOLDFAST_STORE", "sqlite:///holdfast.db"))
runtime.start()  # closed by itself when the server's process exits

app = Flask(__name__)
app.secret_key = os.environ.get("SECRET_KEY", secrets.token_urlsafe())


@app.post("/login/<name>")
def login(name: str):
    """Replace this with your own login."""
    session["user"] = name
    return jsonify(user=name)


def get_user() -> str:
    """Return the name of the user who sent the request; refuse others."""
    return session.get("user") or abort(401)


@app.post("/messages")
def send_message():
    """Send a message to the agent; answer once its turn has ended or needs a decision."""
    return describe(runtime.run(request.json["text"], conversation=request.json.get("conversation"), by=get_user()))


@app.get("/pending")
def list_pending():
    """List the calls that wait for a decision."""
    get_user()
    return jsonify([describe_call(pending) for pending in runtime.pending()])


@app.post("/pending/<conversation>/<call>")
def decide(conversation: str, call: str):
    """Approve or deny a call, and answer once its turn has ended or needs the next decision."""
    given = request.json
    decision = Approve(digest=given["digest"]) if given["approve"] else Deny(given.get("reason", ""))
    runtime.resolve(conversation, call, decision, by=get_user())
    return describe(runtime.wait(conversation))


@app.errorhandler(HoldfastError)
def refuse(error: HoldfastError):
    """Answer with the error's kind and message."""
    return jsonify(kind=error.kind, message=error.message), error.http_status


def describe(result: TurnResult):
    """Return a result as JSON."""
    pending = [describe_call(each) for each in result.pending]
    return jsonify(conversation=result.conversation, reason=result.reason, text=result.text, pending=pending)


def describe_call(pending: Pending) -> dict[str, object]:
    """Return the part of a pending call that an approver needs; the digest binds the approval to it."""
    names = ("conversation", "call", "tool", "prompt", "args", "digest")
    return {name: getattr(pending, name) for name in names}
