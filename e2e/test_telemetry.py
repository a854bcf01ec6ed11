"""What the server tells a collector: metrics and traces over OTLP, read with OpenTelemetry's own definitions."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stack import Stack, wait_for

pytestmark = pytest.mark.sandglass

KINDS = {"/v1/metrics": ExportMetricsServiceRequest, "/v1/traces": ExportTraceServiceRequest}


class Collector:
    """Keeps every request that can be read as what its path says."""

    def __init__(self):
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                request = KINDS[self.path]()
                request.ParseFromString(body)
                collector.seen.append(request)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.seen = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def metrics(self):
        """The newest export: {name: (metric, scope, resource attributes)}."""
        exports = [r for r in self.seen if isinstance(r, ExportMetricsServiceRequest)]
        found = {}
        for resource in exports[-1].resource_metrics if exports else []:
            attributes = plain(resource.resource.attributes)
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    found[metric.name] = (metric, scope.scope.name, attributes)
        return found

    def spans(self):
        exports = [r for r in self.seen if isinstance(r, ExportTraceServiceRequest)]
        return [
            span
            for export in exports
            for resource in export.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def plain(attributes):
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


@pytest.fixture
def collector():
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def told(collector):
    otel = {"enabled": True, "endpoint": f"{collector.url}/v1/metrics", "export_interval_millis": 1000, "traces": True}
    stack = Stack(config={"otel": otel, "log": {"format": "json"}})
    stack.start()
    yield stack
    problems = stack.close()
    assert not problems, "\n".join(problems)


BODY = {"image": {"uri": "host"}, "entrypoint": ["sleep", "60"], "timeout": 120, "resourceLimits": {}}


def test_metrics_and_traces_reach_a_collector(told, collector):
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"OPEN-SANDBOX-API-KEY": told.key, "User-Agent": "OpenSandbox-Python-SDK/9.8.7"}
    with httpx.Client(base_url=told.url, headers=headers, timeout=30) as http:
        made = http.post("/v1/sandboxes", json=BODY, headers={"traceparent": parent, "x-request-id": "the-create"})
        assert made.status_code == 202, made.text
        # A create that takes long is answered before it is done.
        path = f"/v1/sandboxes/{made.json()['id']}"
        assert wait_for(lambda: http.get(path).json()["status"]["state"] == "Running")
        report = {"eventType": "sandbox.create", "createDurationMs": 300, "success": True}
        assert http.post("/v1/metrics/events", json=report).status_code == 204
        assert http.get("/v1/sandboxes", headers={"OPEN-SANDBOX-API-KEY": "wrong"}).status_code == 401
        assert http.get("/metrics").text.count("# TYPE server_http_request_duration_milliseconds histogram") == 1
        assert httpx.get(f"{told.url}/metrics", timeout=60).status_code == 401
    create = "opensandbox.sandbox.create.duration"
    assert wait_for(lambda: create in collector.metrics())
    metric, scope, resource = collector.metrics()[create]
    assert (metric.unit, scope, resource["service.name"]) == ("ms", "opensandbox.server", "opensandbox-server")
    (point,) = metric.histogram.data_points
    assert plain(point.attributes) == {"sdk.language": "python", "sdk.version": "9.8.7", "success": True}
    assert (point.count, point.sum, list(point.explicit_bounds)[:3]) == (1, 300, [100, 250, 500])
    assert list(point.bucket_counts) == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]

    def seen():
        requests, _, _ = collector.metrics()["server.http.request.duration"]
        return {tuple(plain(p.attributes).values()): p.count for p in requests.histogram.data_points}

    # The last of them, which an export may have come before.
    assert wait_for(lambda: ("GET", "/v1/sandboxes", 401) in seen()), seen()
    assert seen()["POST", "/v1/sandboxes", 202] == seen()["GET", "/v1/sandboxes", 401] == 1
    states, scope, _ = collector.metrics()["sandglass.sandboxes"]
    assert scope == "sandglass"
    assert {plain(p.attributes)["state"]: p.as_int for p in states.gauge.data_points}["Running"] == 1

    def create_spans():
        return {s.name: s for s in collector.spans() if s.trace_id.hex().startswith("0af765")}

    assert wait_for(lambda: len(create_spans()) == 3), collector.spans()
    spans = create_spans()
    request = spans["POST /v1/sandboxes"]
    assert request.parent_span_id.hex() == "b7ad6b7169203331" and request.kind == 2
    assert plain(request.attributes)["opensandbox.request_id"] == "the-create"
    for phase in ("sandbox.prepare", "sandbox.start"):
        assert spans[phase].parent_span_id == request.span_id
        assert plain(spans[phase].attributes)["opensandbox.sandbox.id"] == made.json()["id"]

    # One object a line; the create's own lines carry its request's id, also those of the work that went on behind it.
    lines = [json.loads(line) for line in told.log.read_text().splitlines()]
    mine = [line for line in lines if line["request_id"] == "the-create"]
    assert any(line["fields"].get("route") == "/v1/sandboxes" for line in mine), mine
    assert told.key not in told.log.read_text()


def test_what_is_left_is_sent_at_the_end(collector):
    otel = {"enabled": True, "endpoint": f"{collector.url}/v1/metrics", "export_interval_millis": 3600000}
    stack = Stack(config={"otel": otel})
    stack.start()
    httpx.get(f"{stack.url}/health", timeout=60)
    assert not collector.metrics()
    assert not stack.close()
    assert "server.http.request.duration" in collector.metrics()
    assert not collector.spans()


def test_collector_that_never_answers_holds_up_nothing():
    class Deaf(BaseHTTPRequestHandler):
        def do_POST(self):
            threading.Event().wait(30)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Deaf)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1/metrics"
    stack = Stack(config={"otel": {"enabled": True, "endpoint": url, "export_interval_millis": 1000, "traces": True}})
    stack.start()
    with httpx.Client(base_url=stack.url, timeout=20) as http:
        for _ in range(3000):
            assert http.get("/health").status_code == 200
    # Less than the collector takes to give up on one request.
    assert stack.stop(25) == 0
    assert not stack.close()
    server.shutdown()
    server.server_close()
