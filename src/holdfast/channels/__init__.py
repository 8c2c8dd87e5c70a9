"""Channels: reach people and programs when a call waits, is decided or expires.

Give them to the runtime: ``Runtime(agent, channels=[Webhook(...), Mail(...)])``. Each is a small class behind the
protocol ``Channel``, and an application can write its own.
"""

from holdfast.channels.links import Links, OpenedLink
from holdfast.channels.mail import Mail
from holdfast.channels.route import Route
from holdfast.channels.slack import Slack
from holdfast.channels.teams import Teams
from holdfast.channels.webhook import Webhook
from holdfast.core.notice import Channel, Notice, ReceiverGone, TryLater, Undeliverable

__all__ = [
    "Channel",
    "Links",
    "Mail",
    "Notice",
    "OpenedLink",
    "ReceiverGone",
    "Route",
    "Slack",
    "Teams",
    "TryLater",
    "Undeliverable",
    "Webhook",
]
