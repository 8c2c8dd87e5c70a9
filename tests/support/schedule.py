"""The schedule of a parallel run: which tests share a process, and which start first.

The tests of a file run in one process, one after the other. Files that need the same expensive resource (a server of
PostgreSQL, the server of the page, the providers' packages) share a few processes. The long groups start first, so that
none is left at the end. pytest-xdist has a mark for groups (``--dist loadgroup``), which has no effect with pytest 9.2.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadScopeScheduling

GROUPS = {
    "types": ["test_types.py"],
    "chaos on SQLite": ["chaos/test_chaos.py"],
    "chaos on PostgreSQL": ["chaos/test_chaos_postgres.py", "stores/test_postgres_faults.py"],
    "page 1": ["page/test_page.py", "page/test_page_cards.py"],
    "page 2": [
        "page/test_page_under_stress.py",
        "page/test_page_keyboard.py",
        "page/test_page_inbox.py",
        "page/test_page_guard.py",
        "page/test_page_layout.py",
    ],
    "page 3": [
        "page/test_page_network.py",
        "page/test_page_client.py",
        "page/test_page_workspace.py",
        "page/test_page_approvers.py",
        "page/test_page_links.py",
        "page/test_page_deputies.py",
        "page/test_page_demo.py",
    ],
    "documentation": ["docs/test_snippets.py", "docs/test_site.py"],
    "models": [
        "models/test_legal_histories.py",
        "models/test_recordings.py",
        "models/test_requests.py",
        "models/test_runtime.py",
        "models/test_runtime_histories.py",
        "models/test_runtime_hosted.py",
        "models/test_strict_provider.py",
    ],
    "bench": ["test_bench.py"],
    "MCP as a server": ["bridges/test_mcp_serve_command.py", "bridges/test_mcp_conformance.py"],
    "state machine": ["runtime/test_state_machine.py"],
    "fuzzing": ["server/test_fuzz.py"],
    "PostgreSQL": [
        "stores/test_postgres.py",
        "stores/test_postgres_address.py",
        "stores/test_postgres_migrations.py",
        "stores/test_postgres_operations.py",
        "stores/test_postgres_notify.py",
        "stores/test_caches.py",
        "channels/test_killed_processes.py",
    ],
    "commands on PostgreSQL": ["cli/test_cli_workers.py", "cli/test_cli_copy.py", "cli/test_cli_upkeep.py"],
}
"""The groups of more than one file, and the files that take long: in the order in which they start."""

ORDER = list(GROUPS)
GROUP_OF = {f"tests/{path}": group for group, paths in GROUPS.items() for path in paths}


def group_of(nodeid: str) -> str:
    """Return the group of a test's file, or else the file itself."""
    path = nodeid.partition("::")[0]
    return GROUP_OF.get(path, path)


def sort_for_workers(items: list[pytest.Item]) -> None:
    """Sort the tests by group, in the order in which the groups start; other files follow as they were collected."""
    items.sort(key=lambda item: ORDER.index(group) if (group := group_of(item.nodeid)) in ORDER else len(ORDER))


class GroupScheduling(LoadScopeScheduling):
    """Give a worker a whole group at a time. The method is the one that the schedulers of pytest-xdist override."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
