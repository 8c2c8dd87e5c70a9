"""``holdfast worker`` as processes that share work, die, stop and are listed, on SQLite and on PostgreSQL."""

import asyncio
import re
import signal
import subprocess
import sys

import httpx
import pytest
from stores import SHIFT, both, ledger, send, until_noted, until_over, url_of
from support import pg
from terminal import assert_refused, environment, until

from holdfast.cli.commands.worker import list_workers
from holdfast.cli.output import EXIT_PIPE

SHORT_LEASE = 4.0  # where a test waits until one is over
AGENTS = (f"{SHIFT}:digger", f"{SHIFT}:filler")


def start_worker(desk, url, *words, agents=AGENTS[:1]):
    started = desk.start("worker", *agents, "--store", url, *words)
    started.until(" on ")
    return started


def send_signals(running, *signals):
    for each in signals:
        running.process.send_signal(each)


def read_workers(desk, url):
    """Return the workers that ``holdfast workers`` lists, and its line about the conversations without one."""
    result = desk("workers", "--json", "--store", url)
    assert result.code == 0, result.err
    *found, left = result.objects
    return found, left


@both
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_prints_its_id_runs_owed_work_and_stops_after_a_signal(desk, kind, sig):
    url = url_of(kind, desk)
    with start_worker(desk, url, agents=AGENTS) as one:
        (desk.path / "c").touch()
        send(url, "c")
        assert until_over(url, "c")[-1].reason == "completed"
        message = one.out
        assert re.match(r"worker \S+ runs digger, filler on \S+", message)
        assert message.count("\n") == 1
        send_signals(one, sig)
        assert one.end() == 0
        assert one.out.removeprefix(message).splitlines() == [
            "finishing 0 running calls",
            "stopped; unfinished work is in the store",
        ]
    assert read_workers(desk, url)[0] == []


@both
def test_another_worker_takes_over_after_the_lease_of_a_killed_one_expires(desk, kind):
    url = url_of(kind, desk, lease=SHORT_LEASE)
    with start_worker(desk, url) as one, start_worker(desk, url) as two:
        send(url, "c")
        [dead] = until_noted(desk, "began", "c")
        killed = one if one.process.pid == dead else two
        killed.kill()
        pids = until_noted(desk, "began", "c", 2)
        assert pids[1] == (two if killed is one else one).process.pid
        (desk.path / "c").touch()
        assert until_over(url, "c")[-1].reason == "completed"


@both
def test_after_sigterm_the_conversations_of_a_worker_are_taken_over_at_once(desk, kind):
    """Not after a lease, which is an hour here: the one that leaves says so."""
    url = url_of(kind, desk, lease=3600)
    holes = [f"c{n}" for n in range(4)]
    with start_worker(desk, url, "--drain", "0") as one:
        send(url, *holes)
        for hole in holes:
            until_noted(desk, "began", hole)
        with start_worker(desk, url) as two:
            send_signals(one, signal.SIGTERM)
            for hole in holes:
                assert until_noted(desk, "began", hole, 2)[1] == two.process.pid
            assert one.end() == 0
            for hole in holes:
                (desk.path / hole).touch()
                assert until_over(url, hole)[-1].reason == "completed"


@both
def test_after_sigterm_running_tools_finish_and_no_new_work_starts(desk, kind):
    url = url_of(kind, desk)
    with start_worker(desk, url, "--drain", "60") as one:
        send(url, "short", "long")
        until_noted(desk, "began", "short")
        until_noted(desk, "began", "long")
        send_signals(one, signal.SIGTERM)
        one.until("finishing 2 running calls, at most 60 s; a second signal stops at once")
        send(url, "new")
        (desk.path / "new").touch()
        (desk.path / "short").touch()
        until_noted(desk, "dug", "short")
        with start_worker(desk, url) as two:
            # What has ended there is taken over while the rest goes on.
            assert until_over(url, "short")[-1].reason == "completed"
            assert until_noted(desk, "dug", "new") == [two.process.pid]
            assert one.process.poll() is None
            (desk.path / "long").touch()
            assert one.end() == 0
            assert until_over(url, "long")[-1].reason == "completed"
    assert sorted(hole for what, hole, _ in ledger(desk) if what == "dug") == ["long", "new", "short"]
    assert [pid for what, hole, pid in ledger(desk) if hole != "new"] == [one.process.pid] * 4


@both
def test_a_second_signal_stops_a_worker_at_once_and_releases_its_leases(desk, kind):
    url = url_of(kind, desk)
    with start_worker(desk, url, "--drain", "3600") as one:
        send(url, "c")
        until_noted(desk, "began", "c")
        send_signals(one, signal.SIGTERM)
        one.until("finishing 1 running call,")
        send_signals(one, signal.SIGTERM)
        assert one.end() == 0  # the hour of --drain is not waited for
    found, left = read_workers(desk, url)
    assert (found, left["unheld"], left["agents"]) == ([], 1, ["digger"])


@both
def test_a_worker_at_its_limit_leaves_the_other_conversations_to_another_worker(desk, kind):
    url = url_of(kind, desk)
    holes = [f"c{n}" for n in range(3)]
    with start_worker(desk, url, "--max-conversations", "2") as one:
        assert one.out.rstrip().endswith(", 2 conversations at once")
        send(url, *holes)
        until(lambda: len(ledger(desk)) == 2)
        found, left = read_workers(desk, url)
        assert (left["unheld"], [each["holds"] for each in found if each["agents"]]) == (1, [2]), (ledger(desk), found)
        with start_worker(desk, url, "--max-conversations", "2") as two:
            until(lambda: len(ledger(desk)) == 3)
            assert [pid for _, _, pid in ledger(desk)] == [one.process.pid] * 2 + [two.process.pid]
            for hole in holes:
                (desk.path / hole).touch()
                until_over(url, hole)


@both
def test_workers_are_listed_with_their_conversations_and_the_unheld_ones(desk, kind):
    url = url_of(kind, desk, lease=SHORT_LEASE)
    with start_worker(desk, url) as one, start_worker(desk, url, agents=AGENTS[1:]) as two:
        send(url, "c")
        until_noted(desk, "began", "c")
        send(url, "nobody's", agent="someone")
        found, left = read_workers(desk, url)
        by_pid = {each["pid"]: each for each in found}
        assert set(by_pid) == {one.process.pid, two.process.pid}
        mine, other = by_pid[one.process.pid], by_pid[two.process.pid]
        assert (mine["agents"], mine["holds"], mine["alive"]) == (["digger"], 1, True)
        assert (other["agents"], other["holds"], other["alive"]) == (["filler"], 0, True)
        if kind == "postgres":
            assert 0 < mine["lapses_in"] < SHORT_LEASE + 1  # by the database's clock, as far as it is known here
        else:
            assert mine["lapses_in"] is None
        assert (left["unheld"], left["agents"]) == (1, ["someone"])
        assert 0 <= left["lag"] < 30
        one.kill()
        until(
            lambda: not {each["pid"]: each for each in read_workers(desk, url)[0]}.get(one.process.pid, {}).get("alive")
        )
        result = desk("workers", "--store", url)
        assert "2 conversations have work to do and no process holds them; the oldest has waited" in result.out
        assert "no process runs digger, someone: " in result.out
        if kind == "postgres":  # on SQLite the dead are forgotten as soon as somebody opens the store
            assert re.search(rf"{mine['pid']} .* dead for \d+ s +1\n", result.out)
    assert desk("workers", "--store", url_of("sqlite", desk, "none")).code == 3


def test_dead_workers_without_conversations_are_only_counted_and_the_table_fits_80_columns(monkeypatch, capsys):
    url = url_of("postgres")
    send(url, "c", agent="a")
    row = "INSERT INTO owners SELECT $1, $2, 1234567, $3, now() - interval '12 days', now() + make_interval(secs => $4)"
    host, agents = "desk-worker-7d9f8b6c5-x2x4z.internal", ["support", "billing", "night-shift"]
    pg.sql(url, row, "1234567-0123456789ab", agents, host, 100.0)
    pg.sql(url, row, "dead-and-holds", agents, host, -100.0)
    pg.sql(url, "UPDATE conversations SET owner = 'dead-and-holds'")
    for number in range(3):
        pg.sql(url, row, f"dead-{number}", agents, host, -100.0)
    monkeypatch.setenv("COLUMNS", "80")
    asyncio.run(list_workers(url, as_json=False))
    *table, gone, _, _ = capsys.readouterr().out.splitlines()
    assert gone == "3 are dead and held nothing"
    assert max(map(len, table)) <= 80
    assert re.fullmatch(r" +pid  host +agents +since +alive +holds", table[0])
    rows = [line for line in table if "1234567" in line]
    assert re.fullmatch(r"1234567  desk-worker-\S+ +support, \S+ +12 d +yes, \d+\.\d s left +0", rows[0])
    assert re.fullmatch(r"1234567  desk-worker-\S+ +support, \S+ +12 d +dead for 1 min \d\d s +1", rows[1])
    assert len(rows) == 2
    asyncio.run(list_workers(url, as_json=True))
    assert len(capsys.readouterr().out.splitlines()) == 5 + 1, "a program can count for itself"
    pg.drop(url)


@both
def test_one_process_serves_the_page_and_another_runs_the_turns(desk, kind):
    """B31: what is decided on the page is run by a worker."""
    url = url_of(kind, desk)
    with (
        start_worker(desk, url, agents=AGENTS[1:]) as one,
        desk.start("serve", AGENTS[1], "--no-run", "--port", 0, "--store", url) as page,
        httpx.Client(trust_env=False, timeout=60) as http,
    ):
        message = page.until("workers on the same store do")
        found = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)", message)
        http.base_url, http.headers["authorization"] = found[1], f"Bearer {found[2]}"
        assert http.post("/api/conversations", json={"id": "c"}).status_code == 201
        assert http.post("/api/conversations/c/messages", json={"text": "go"}).status_code == 202
        [entry] = until(lambda: http.get("/api/pending").json()["pending"])
        assert [each["agents"] for each in read_workers(desk, url)[0] if each["pid"] == page.process.pid] == [[]]
        decision = {"decision": {"type": "approve", "digest": entry["digest"]}}
        assert http.post(f"/api/conversations/c/calls/{entry['call']}/resolve", json=decision).status_code == 200
        assert until_over(url, "c")[-1].reason == "completed"
        assert ledger(desk) == [("filled", "c", one.process.pid)]


def test_a_server_without_an_agent_shows_conversations_and_records_decisions(desk):
    url = url_of("sqlite", desk)
    send(url, "c", agent="filler")
    with (
        desk.start("serve", "--no-run", "--port", 0, "--store", url) as page,
        httpx.Client(trust_env=False, timeout=60) as http,
    ):
        found = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)", page.until("workers on the same store do"))
        http.base_url, http.headers["authorization"] = found[1], f"Bearer {found[2]}"
        assert http.get("/api/conversations/c").json()["state"] == "preparing"
        assert http.post("/api/conversations", json={"id": "d"}).status_code == 422


def test_an_unreachable_store_is_reported_once_and_the_worker_continues_when_it_is_back(desk):
    assert_refused(desk("worker", AGENTS[0], "--store", "sqlite:///no/where.db"), 1, "[log_read_failed]", "create it")
    url = url_of("postgres", desk, lease=SHORT_LEASE)
    with start_worker(desk, url) as one, desk.start("serve", "--no-run", "--port", 0, "--store", url) as page:
        page.until("Its token changes at each start: $HOLDFAST_TOKEN sets a permanent one.\nIt runs nothing")
        pg.server().halt()
        try:
            for each in (one, page):
                each.until("; retrying\n")
        finally:
            pg.server().start()
        for each in (one, page):
            each.until(" is back\n")
        send_signals(page, signal.SIGTERM)
        assert page.end() == 0
        assert page.out.count("; retrying\n") == page.out.count("is back") == 1
        (desk.path / "c").touch()
        send(url, "c")
        assert until_over(url, "c")[-1].reason == "completed"
        assert one.out.count("; retrying\n") == one.out.count("is back") == 1
        send_signals(one, signal.SIGTERM)
        assert one.end() == 0


def test_a_signal_stops_a_worker_even_if_its_store_and_its_output_are_gone(desk):
    url = url_of("postgres", desk)
    words = [sys.executable, "-m", "holdfast", "worker", AGENTS[0], "--store", url]
    with subprocess.Popen(words, cwd=desk.path, env=environment(), stdout=subprocess.PIPE) as one:
        try:
            assert b" runs digger on " in one.stdout.readline()
            one.stdout.close()
            send(url, "c")
            until_noted(desk, "began", "c")
            pg.server().halt()
            try:
                one.send_signal(signal.SIGTERM)
                one.send_signal(signal.SIGTERM)
                assert one.wait(60) in (0, EXIT_PIPE)
            finally:
                pg.server().start()
        finally:
            one.kill()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "Missing argument"),
        (("nowhere:agent",), 2, "no module"),
        ((AGENTS[0], AGENTS[0]), 2, "two agents are called 'digger'"),
        ((AGENTS[0], "--store", "memory:"), 2, "cannot see one in memory"),
        ((AGENTS[0], "--store", "mysql://x"), 2, "unknown store"),
        ((AGENTS[0], "--max-conversations", "0"), 2, "--max-conversations"),
        ((AGENTS[0], "--drain", "-1"), 2, "--drain"),
    ],
)
def test_invalid_arguments_of_a_worker_are_refused_in_one_line(desk, words, code, message):
    assert_refused(desk("worker", *words), code, message)


@pytest.mark.parametrize(
    ("command", "ready"),
    [
        (("worker", AGENTS[0]), "runs digger on "),
        (("serve", AGENTS[0], "--port", "0"), "digger is served at "),
    ],
)
def test_commands_started_while_postgresql_is_down_retry_until_it_is_back(desk, command, ready):
    """B58: a database that restarts is no reason to exit, at the start neither."""
    url = url_of("postgres")
    pg.server().halt()
    try:
        started = desk.start(*command, "--store", url)
        started.until("; retrying in 0.5 s\n")
        started.until("; retrying in 1 s\n")
    finally:
        pg.server().start()
    with started:
        started.until(ready)
        started.process.send_signal(signal.SIGTERM)
        assert started.end() == 0


@pytest.mark.parametrize("command", [("worker", AGENTS[0]), ("serve", AGENTS[0], "--port", "0")])
@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_command_that_waits_for_postgresql(desk, command, sig):
    nowhere = f"postgresql://postgres@127.0.0.1:{pg.server().port + 1}/postgres"
    with desk.start(*command, "--store", nowhere) as waiting:
        waiting.until("nothing listens there")
        waiting.until("; retrying in 0.5 s\n")
        send_signals(waiting, sig)
        assert waiting.end() == (130 if sig == signal.SIGINT else -sig)
        assert "Traceback" not in waiting.out


@pytest.mark.parametrize("command", [("worker", AGENTS[0]), ("serve", AGENTS[0], "--port", "0")])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("nosuch@127.0.0.1:{port}/postgres", "nosuch"),
        ("postgres@127.0.0.1:{port}/nosuch", "there is no such database"),
        ("postgres@nosuch.invalid:{port}/postgres", "it cannot be reached"),
    ],
)
def test_a_permanent_error_in_the_postgresql_url_ends_the_command_at_once(desk, command, wrong, message):
    url = f"postgresql://{wrong.format(port=pg.server().port)}"
    assert_refused(desk(*command, "--store", url), 1, message)
