"""``GET /metrics``: its format, who may read it, and the dashboard that is made for it."""

import json
import re
from pathlib import Path

import httpx
import pytest
from support.prometheus import parse_exposition, parse_query
from support.web_site import TOKEN, refund_agent, site

from holdfast import Principal, Runtime
from holdfast.core.log_counts import LOG_FAMILIES, Samples
from holdfast.errors import Invalid
from holdfast.runtime.metrics import PROCESS_FAMILIES, STORE_FAMILIES
from holdfast.server import TokenAuth, app
from holdfast.server.metrics import CONTENT_TYPE, render_metrics
from holdfast.stores.base import ChannelRow
from holdfast.stores.memory import MemoryStore
from holdfast.testing.store_contract.harness import make_append

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "metrics"
GOLDEN = sorted((ROOT / "tests" / "golden" / "v1").glob("*.jsonl"))
METRICS_TOKEN = "a-token-for-prometheus"
FAMILIES = [*LOG_FAMILIES.values(), *STORE_FAMILIES, *PROCESS_FAMILIES]


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    """Each scrape is up to date."""
    monkeypatch.setattr("holdfast.runtime.metrics.CACHE_SECONDS", 0.0)


async def scrape(s, token: str | None = METRICS_TOKEN):
    """Return the response to a scrape with this token."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(base_url=s.base, headers=headers, trust_env=False, timeout=60) as http:
        return await http.get("/metrics")


async def busy_store():
    """Return a store with every kind of event, and a channel that nothing is delivered to."""
    store = MemoryStore()
    await store.open()
    await store.put_channel(ChannelRow(name="desk", kinds=()))
    for path in GOLDEN:
        if not path.stem.endswith(".trace"):
            await store.append(make_append(path.stem, 0, *path.read_bytes().splitlines(), notices=[(1, "resolved")]))
    await store.append(make_append("retry", 0, *(line.encode() for line in RETRIED)))
    return store.sibling()


RETRIED = (
    '{"type":"ConversationOpened","seq":1,"at":1.0,"by":{"id":"u"},"v":1,"agent":"desk"}',
    '{"type":"HistorySummarised","seq":2,"at":2.0,"by":{"id":"system"},"v":1,"upto":1,"text":"s","attempts":['
    '{"model":"openai:gpt-5@https://secret-host/v1","error":{"kind":"rate_limited","message":"slow"}},'
    '{"model":"openai:gpt-5@https://secret-host/v1","usage":{"input_tokens":7,"output_tokens":2,"cost":0.25}}]}',
)


async def test_a_scrape_is_valid_and_has_every_metric_with_its_labels():
    """The text format is parsed strictly; names, kinds and labels are those that the documentation lists [B123]."""
    async with site(refund_agent(), store=await busy_store(), metrics_token=METRICS_TOKEN) as s:
        await s.begin()
        await s.pending()
        response = await scrape(s)
        assert (response.status_code, response.headers["content-type"]) == (200, CONTENT_TYPE)
        assert response.headers["cache-control"] == "no-store"
        found = parse_exposition(response.text)
    assert {name: (metric.kind, metric.help) for name, metric in found.items()} == {
        family.name: (family.kind, family.help) for family in FAMILIES
    }
    for family in FAMILIES:
        labels = {tuple(key for key, _ in labels if key != "le") for _, labels in found[family.name].samples}
        assert labels <= {tuple(sorted(family.labels))}, family.name
    key = "holdfast_tokens_total", (("model", "openai:gpt-5"), ("type", "input"))
    assert found["holdfast_tokens_total"].samples[key] == 7
    assert "secret-host" not in response.text, "the address of a model is not a label"


async def test_label_values_that_need_escapes_are_escaped():
    """A name with quotes, backslashes and line breaks cannot forge a sample."""
    family = LOG_FAMILIES["holdfast_votes_total"]
    evil = 'a"} 1\nforged{x="\\'
    found = parse_exposition(render_metrics([Samples(family, {(evil,): 2.0})]))
    ((_, ((_, value),)),) = found[family.name].samples
    assert value == 'a\\"} 1\\nforged{x=\\"\\\\'


async def test_metrics_are_not_open_and_the_token_for_them_opens_nothing_else():
    """/metrics follows the rules of the API; Prometheus has a token of its own [B123]."""
    async with site(refund_agent(), metrics_token=METRICS_TOKEN) as s:
        assert [(await scrape(s, token)).status_code for token in (None, "wrong", METRICS_TOKEN, TOKEN)] == [
            401,
            401,
            200,
            200,
        ]
        other = {"authorization": f"Bearer {METRICS_TOKEN}"}
        async with httpx.AsyncClient(base_url=s.base, headers=other, trust_env=False) as http:
            for path in ("/api/conversations", "/api/pending", "/api/me", "/"):
                assert (await http.get(path)).status_code == 401, path
            assert (await http.post("/metrics")).status_code in (401, 405)
            assert (await http.get("/metrics", params={"token": METRICS_TOKEN}, headers={"authorization": ""})).is_error
    async with site(refund_agent()) as s:
        assert (await scrape(s)).status_code == 401, "without a token for metrics there is none that fits"
        assert (await scrape(s, "")).status_code == 401


async def test_a_principal_that_may_not_see_everything_may_not_read_the_metrics():
    """Numbers about all conversations tell of those that ``may_see`` hides."""

    def by_name(request):
        return request.headers.get("x-name") or None

    async def read(s, name):
        return (await s.http.get("/metrics", headers={"x-name": name})).status_code

    async with site(refund_agent(), auth=by_name) as s:
        assert await read(s, "ada") == 200, "every principal sees all conversations"
    async with site(refund_agent(), auth=by_name, may_see=lambda who, name: True) as s:
        refused = await s.http.get("/metrics", headers={"x-name": "ada"})
        assert (refused.status_code, refused.json()["kind"]) == (403, "permission_denied")

    async def allow(principal: Principal):
        return principal.id == "ops"

    async with site(refund_agent(), auth=by_name, may_see=lambda who, name: False, may_read_metrics=allow) as s:
        assert [await read(s, "ops"), await read(s, "ada")] == [200, 403]
    async with site(refund_agent(), auth=by_name, may_read_metrics=lambda who: False) as s:
        assert await read(s, "ada") == 403


@pytest.mark.parametrize("token", ["", "short", "with a space in it!", "täglich-ein-neues-geheimnis"])
async def test_a_weak_token_for_the_metrics_is_refused(token):
    with pytest.raises(Invalid, match="16 or more printable"):
        app(Runtime(), TokenAuth(TOKEN), metrics_token=token)


async def test_the_names_of_conversations_and_principals_are_not_in_the_metrics():
    """Labels have few values, and none of them names a person or a conversation [B123]."""
    async with site(refund_agent(), metrics_token=METRICS_TOKEN) as s:
        await s.begin("a-secret-conversation")
        (entry,) = await s.pending()
        await s.post(
            f"/api/conversations/a-secret-conversation/calls/{entry['call']}/resolve",
            {"decision": {"type": "approve", "digest": entry["digest"]}},
        )
        await s.idle("a-secret-conversation")
        text = (await scrape(s)).text
        assert 'holdfast_decisions_total{tool="refund",kind="approval",outcome="approve"} 1' in text
        assert "secret-conversation" not in text
        assert '"ada"' not in text


async def test_every_query_of_the_dashboard_and_the_alerts_names_metrics_and_labels_of_a_real_scrape():
    """The dashboard and the alerts in examples/metrics fit what the server serves."""
    async with site(refund_agent(), store=await busy_store(), metrics_token=METRICS_TOKEN) as s:
        await s.begin()
        await s.pending()
        found = parse_exposition((await scrape(s)).text)
    series = {}
    for metric in found.values():
        for name, labels in metric.samples:
            series.setdefault(name, set()).update(key for key, _ in labels)
    added = {"instance", "job"}  # by Prometheus
    dashboard = json.loads((EXAMPLE / "dashboard.json").read_text())
    queries = [(panel["title"], target) for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 20
    alerts = re.findall(r"(?m)^ +- alert: (\w+)\n +expr: (.+)$", (EXAMPLE / "alerts.yml").read_text())
    assert len(alerts) == (EXAMPLE / "alerts.yml").read_text().count("expr:") > 0
    queries += [(name, {"expr": re.sub(r" > [0-9]+$", "", query), "legendFormat": ""}) for name, query in alerts]
    for title, target in queries:
        use = parse_query(target["expr"])
        known = set()
        for name, labels in use.selected:
            assert name in series, f"{title}: {name} is not in a scrape"
            assert labels <= series[name] | added, f"{title}: {labels} of {name}"
            known |= series[name] | added
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert use.grouped | shown <= known, f"{title}: {use.grouped | shown} are not labels of {use.selected}"
        assert shown <= use.grouped, f"{title}: {shown} are not in the result"


async def test_the_parser_of_queries_finds_names_that_do_not_exist():
    """The check of the dashboard can fail."""
    use = parse_query('sum by (le, tool) (max without (instance) (rate(no_such_bucket{outcome!="ok"}[5m]))) * 60')
    assert use.selected == [("no_such_bucket", frozenset({"outcome"}))]
    assert use.grouped == {"le", "tool", "instance"}
    with pytest.raises(AssertionError):
        parse_query("sum(x))")
