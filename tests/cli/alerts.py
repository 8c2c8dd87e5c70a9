"""An agent whose module has a list of channels; ``RECEIVER`` in the environment is the address of a webhook."""

import os

from support.notices import refund_agent
from support.receivers import SECRET

from holdfast.channels import Webhook

agent = refund_agent()
channels = [Webhook(os.environ["RECEIVER"], SECRET, name="hook", allow_private=True, kinds=("suspended",))]
