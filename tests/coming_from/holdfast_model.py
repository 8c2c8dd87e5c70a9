"""A model that follows a script, in place of a real one."""

from holdfast import ScriptedModel, ToolCall

LOOK_UP = ToolCall("find_address", {"name": "Ada"})
SEND = ToolCall("send_mail", {"to": "ada@example.org", "text": "The build is green."})
model = ScriptedModel([[LOOK_UP], [SEND], "Ada has been told."], follow=True)
