//! Measurements sent to a collector.

use std::io::{Read, Write};
use std::net::TcpListener;

use serde_json::{Value, json};

use crate::support::Agent;

/// Takes one export and answers with `status`.
fn take(listener: &TcpListener, status: &str) -> (String, Value) {
    let (mut stream, _) = listener.accept().unwrap();
    let mut raw = Vec::new();
    let mut buffer = [0; 65536];
    loop {
        let count = stream.read(&mut buffer).unwrap();
        raw.extend_from_slice(&buffer[..count]);
        let text = String::from_utf8_lossy(&raw);
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        if let Ok(value) = serde_json::from_str(body) {
            let head = head.to_owned();
            let _ = write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\n{{}}");
            return (head, value);
        }
        assert!(count > 0, "an export that breaks off: {text}");
    }
}

fn metric<'a>(export: &'a Value, name: &str) -> Option<&'a Value> {
    let metrics = export["resourceMetrics"][0]["scopeMetrics"][0]["metrics"].as_array().unwrap();
    metrics.iter().find(|metric| metric["name"] == name)
}

fn attributes(point: &Value) -> Vec<String> {
    let attributes = point["attributes"].as_array().unwrap();
    let text = |v: &Value| v.as_str().unwrap().to_owned();
    attributes.iter().map(|a| format!("{}={}", text(&a["key"]), text(&a["value"]["stringValue"]))).collect()
}

#[test]
fn measurements_reach_a_collector() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://localhost:{}/", listener.local_addr().unwrap().port());
    let agent = Agent::start_with(
        &[],
        &[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint),
            ("OTEL_METRIC_EXPORT_INTERVAL", "100"),
            ("OPENSANDBOX_ID", "s1"),
            ("OPENSANDBOX_EXECD_METRICS_EXTRA_ATTRS", "team=a"),
        ],
    );
    agent.shell("true");
    agent.shell("false");
    agent.get("/files/info?path=/no/such");
    // What one export does not deliver, the next one does.
    drop(take(&listener, "503 Service Unavailable"));
    drop(listener.accept().unwrap());
    let export = loop {
        let (head, export) = take(&listener, "200 OK");
        assert!(head.starts_with("POST /v1/metrics HTTP/1.1"), "{head}");
        assert!(head.to_lowercase().contains("content-type: application/json"), "{head}");
        let complete = metric(&export, "execd.execution.duration")
            .is_some_and(|m| m["histogram"]["dataPoints"].as_array().unwrap().len() == 2);
        if complete {
            break export;
        }
    };
    let scope = &export["resourceMetrics"][0]["scopeMetrics"][0]["scope"];
    assert_eq!(scope["name"], "opensandbox/execd");
    let points = &metric(&export, "execd.execution.duration").unwrap()["histogram"]["dataPoints"];
    let mut results: Vec<_> = points.as_array().unwrap().iter().map(attributes).collect();
    results.sort();
    let of = |result: &str| {
        ["sandbox_id=s1", "team=a", "operation=run_command", result].map(str::to_owned).to_vec()
    };
    assert_eq!(results, [of("result=failure"), of("result=success")]);
    assert_eq!(points[0]["count"], "1");
    assert_eq!(points[0]["bucketCounts"].as_array().unwrap().len(), 16);
    let files = metric(&export, "execd.filesystem.operations.duration").unwrap();
    assert_eq!(attributes(&files["histogram"]["dataPoints"][0])[2..], ["operation=info", "result=failure"]);
    let requests = &metric(&export, "execd.http.request.duration").unwrap()["histogram"]["dataPoints"];
    assert!(requests.as_array().unwrap().iter().any(|point| {
        attributes(point)[2..] == ["http_method=GET", "http_route=/files/info", "http_status_code=404"]
    }));
    for (name, kind) in [
        ("execd.system.process.count", "gauge"),
        ("execd.system.cpu.usage", "gauge"),
        ("execd.system.memory.usage_bytes", "gauge"),
        ("execd.system.network.connections.active", "gauge"),
        ("execd.system.network.io.bytes", "sum"),
    ] {
        assert!(metric(&export, name).unwrap()[kind]["dataPoints"][0]["attributes"].is_array(), "{name}");
    }
}

#[test]
fn an_endpoint_that_cannot_be_used_is_no_harm() {
    for endpoint in ["https://localhost:1", "http://no.such.host.invalid:1", "http://127.0.0.1:1", "%"] {
        let agent = Agent::start_with(
            &[],
            &[("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint), ("OTEL_METRIC_EXPORT_INTERVAL", "100")],
        );
        assert!(agent.shell("echo x").text().contains("execution_complete"), "{endpoint}");
        assert_eq!(agent.get("/metrics").json()["cpu_count"].is_number(), json!(true));
    }
}
