//! The texts as clients see them.

use std::time::Duration;

use super::*;

const ROTATED: &[u8] =
    b"2030-01-01T00:00:00.000000001Z stdout one\n2030-01-01T00:10:00.000000000Z stderr two\n";
const CURRENT: &[u8] =
    b"2030-01-01T00:20:00.500000000Z stdout three \xff\xfe\nno time at all\n2030-01-01T00:30:00.000000000Z stderr \n";

fn select(filter: LogFilter) -> Selection {
    Console { rotated: ROTATED, current: CURRENT }.select(filter)
}

#[test]
fn console_lines_keep_time_and_order() {
    let all = select(LogFilter::last(100));
    assert_eq!(
        all.text,
        "2030-01-01T00:00:00.000000001Z one\n\
         2030-01-01T00:10:00.000000000Z two\n\
         2030-01-01T00:20:00.500000000Z three \u{fffd}\u{fffd}\n\
         no time at all\n\
         2030-01-01T00:30:00.000000000Z \n"
    );
    assert!(!all.truncated);

    let last = select(LogFilter::last(2));
    assert_eq!(last.text, "no time at all\n2030-01-01T00:30:00.000000000Z \n");
    assert!(last.truncated);
    assert!(!select(LogFilter::last(5)).truncated);

    let now = "2030-01-01T00:30:00Z".parse().unwrap();
    let recent = select(LogFilter::last(100).within(parse_since("10m"), now));
    assert_eq!(
        recent.text,
        "2030-01-01T00:20:00.500000000Z three \u{fffd}\u{fffd}\nno time at all\n2030-01-01T00:30:00.000000000Z \n"
    );
    let everything = select(LogFilter::last(100).within(Duration::MAX, now));
    assert_eq!(everything, select(LogFilter::last(100)));
}

#[test]
fn an_empty_console_says_so() {
    let empty = Console { rotated: b"", current: b"" }.select(LogFilter::last(10));
    assert_eq!(empty, Selection { text: "(no logs)".to_owned(), truncated: false });
    let blank = Console { rotated: b"", current: b"\n" }.select(LogFilter::last(10));
    assert_eq!(blank.text, "(no logs)");
}

fn event_facts(count: i64) -> EventFacts {
    let event = |n| EventLine {
        at_ms: 1_893_456_000_000 + n * 1500,
        kind: "oom-kill".to_owned(),
        message: format!("number {n}\nof many"),
    };
    EventFacts {
        id: "0f04bd3a-82ce-431d-8ec7-0a4b0ca245d3".to_owned(),
        status: "Running".to_owned(),
        created_at_ms: 1_893_456_000_000,
        started_at_ms: Some(1_893_456_000_250),
        finished_at_ms: None,
        events: (0..count).map(event).collect(),
    }
}

#[test]
fn events_are_listed_below_the_state() {
    let timeline = render_events(&event_facts(3), 2);
    assert!(timeline.truncated);
    assert_eq!(
        timeline.text,
        "Sandbox:    0f04bd3a-82ce-431d-8ec7-0a4b0ca245d3\n\
         Status:     Running\n\
         Created:    2030-01-01T00:00:00Z\n\
         Started:    2030-01-01T00:00:00.25Z\n\
         Event:      [2030-01-01T00:00:01.5Z] oom-kill: number 1\\nof many\n\
         Event:      [2030-01-01T00:00:03Z] oom-kill: number 2\\nof many\n"
    );
    let quiet = render_events(&event_facts(0), 50);
    assert!(quiet.text.ends_with("\n(no notable events)\n") && !quiet.truncated);
}

fn inspect_facts() -> InspectFacts {
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    InspectFacts {
        id: "0f04bd3a-82ce-431d-8ec7-0a4b0ca245d3".to_owned(),
        name: "sandbox-0f04".to_owned(),
        image: "docker.io/library/python:3.12".to_owned(),
        status: "exited".to_owned(),
        oom_killed: true,
        exit_code: Some(137),
        started_at_ms: Some(1_893_456_000_000),
        finished_at_ms: Some(1_893_456_060_000),
        error: Some("out of memory\nagain".to_owned()),
        cpu_millis: Some(500),
        memory_bytes: Some(512 << 20),
        pids_limit: Some(4096),
        networks: vec![("sandglass".to_owned(), "10.91.0.2".parse().unwrap())],
        ports: vec![
            PortFacts { port: 44772, bound_to: Some("10.91.0.2:44772".to_owned()) },
            PortFacts { port: 8080, bound_to: None },
        ],
        labels: [pair("team", "a"), pair("egress-token", "t0p")].into(),
        env: vec![
            pair("PATH", "/bin"),
            pair("MY_API_KEY", "t0p"),
            pair("db_password", "t0p"),
            pair("TWO", "a\nb"),
        ],
        ..InspectFacts::default()
    }
}

#[test]
fn inspect_is_aligned_and_masked() {
    assert_eq!(
        render_inspect(&inspect_facts()),
        "Container ID:   0f04bd3a-82c\n\
         Name:           sandbox-0f04\n\
         Image:          docker.io/library/python:3.12\n\
         Status:         exited\n\
         Running:        False\n\
         Paused:         False\n\
         OOMKilled:      True\n\
         Exit Code:      137\n\
         Started At:     2030-01-01T00:00:00Z\n\
         Finished At:    2030-01-01T00:01:00Z\n\
         Error:          out of memory\\nagain\n\
         \n\
         Resources:\n  CPU: 0.50 cores\n  Memory: 512 MiB\n  PIDs Limit: 4096\n\
         Network:\n  sandglass: 10.91.0.2\n\
         Ports:\n  44772/tcp -> 10.91.0.2:44772\n  8080/tcp -> (not bound)\n\
         Labels:\n  egress-token=***\n  team=a\n\
         Environment:\n  PATH=/bin\n  MY_API_KEY=***\n  db_password=***\n  TWO=a\\nb\n"
    );
}

#[test]
fn what_the_runtime_adds_is_masked_too() {
    let facts = [("label egress-auth-token", "t0p"), ("driver", "overlay2\nx")];
    let facts = facts.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    assert_eq!(
        render_runtime(&facts),
        "\nRuntime:\n  driver: overlay2\\nx\n  label egress-auth-token: ***\n"
    );
    assert_eq!(render_runtime(&Default::default()), "");
}

#[test]
fn a_summary_survives_a_failed_part() {
    let summary = Summary {
        id: "x".to_owned(),
        inspect: Ok("Container ID:   x\n".to_owned()),
        events: Err("the runtime does not answer".to_owned()),
        logs: Ok("(no logs)".to_owned()),
        tail: 50,
    };
    let (wide, narrow) = ("=".repeat(72), "-".repeat(40));
    assert_eq!(
        render_summary(&summary),
        format!(
            "{wide}\nSANDBOX DIAGNOSTICS SUMMARY\nSandbox ID: x\n{wide}\n\n\
             {narrow}\nINSPECT\n{narrow}\nContainer ID:   x\n\n\
             {narrow}\nEVENTS\n{narrow}\n[error] the runtime does not answer\n\n\
             {narrow}\nLOGS (last 50 lines)\n{narrow}\n(no logs)\n"
        )
    );
}

#[test]
fn scopes_are_words_of_their_kind() {
    assert_eq!(LogScope::parse(" Container "), Ok(LogScope::Container));
    assert_eq!(LogScope::parse("ALL"), Ok(LogScope::All));
    assert_eq!(EventScope::parse("runtime"), Ok(EventScope::Runtime));
    for (wrong, supported) in
        [("", "container, all"), ("runtime", "container, all"), ("lifecycle", "container, all")]
    {
        let error = LogScope::parse(wrong).unwrap_err();
        assert_eq!(error.to_string(), format!("unsupported scope, use one of: {supported}"));
    }
    assert!(EventScope::parse("container").is_err());
}

#[test]
fn descriptors_are_complete() {
    let logs = describe_logs("x", LogScope::Container, Console { rotated: b"", current: CURRENT });
    let json = serde_json::to_value(&logs).unwrap();
    assert_eq!(
        json,
        serde_json::json!({
            "sandboxId": "x", "kind": "logs", "scope": "container", "delivery": "inline",
            "contentType": "text/plain; charset=utf-8", "content": logs.content,
            "contentLength": logs.content.len(), "truncated": false,
        })
    );

    let many = b"2030-01-01T00:00:00.000000000Z stdout x\n".repeat(LOG_LINES + 1);
    let logs = describe_logs("x", LogScope::All, Console { rotated: &many, current: b"" });
    assert_eq!((logs.content.lines().count(), logs.truncated), (LOG_LINES, true));
    assert_eq!(logs.warnings.map(|warnings| warnings.len()), Some(1));

    let events = describe_events(&event_facts(60), EventScope::All);
    assert_eq!((events.content.lines().count(), events.truncated), (EVENT_LINES, true));
    assert!(events.content.contains("number 59") && !events.content.contains("number 0\\n"));
    let events = describe_events(&event_facts(1), EventScope::Runtime);
    assert_eq!((events.kind.as_str(), events.scope.as_str(), events.truncated), ("events", "runtime", false));
}
