//! What the isolation file takes away from every process of the box. Needs root, which has something to lose.

use std::fs;

use serde_json::json;

use crate::isolated::{agent, agent_with, create, lines, run, space};
use crate::support::{root, until};

#[test]
fn a_hardened_box_reduces_its_commands() {
    if !root() {
        return;
    }
    let more = "[hardening]\nenabled = true\n[ebpf]\nenabled = true\n";
    let agent = agent(more);
    let status =
        "grep -E '^(CapEff|CapBnd|NoNew|Seccomp:)' /proc/self/status; unshare -m true; mount -t tmpfs t /mnt";
    let text = agent.shell(status).text();
    for wanted in [
        "CapEff:\\t0000000000000000",
        "CapBnd:\\t0000000000000000",
        "NoNewPrivs:\\t1",
        "Seccomp:\\t2",
        "not permitted",
    ] {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
    let user = agent.post("/command", &json!({ "command": status, "uid": 1234 })).text();
    assert!(user.contains("CapBnd:\\t0000000000000000") && user.contains("Seccomp:\\t2"), "{user}");
    let hardening = agent.get("/v1/isolated/capabilities").json()["hardening"].clone();
    for layer in ["cap_drop", "seccomp"] {
        assert_eq!(hardening[layer]["state"], "degraded");
        assert!(hardening[layer]["message"].as_str().unwrap().contains("EXECD_INIT"));
    }
    assert_eq!(hardening["ebpf"]["state"], "unsupported");
    let id = create(&agent, &space(&agent, "rw"));
    assert_eq!(lines(&run(&agent, &id, "grep CapEff /proc/self/status")), ["CapEff:\t0000000000000000"]);
}

#[test]
fn what_is_kept_and_denied_is_configured() {
    if !root() {
        return;
    }
    let more = "[hardening]\nenabled = true\nkeep_capabilities = [\"CAP_NET_RAW\"]\n[seccomp]\ndeny = [\"mkdir\", \"mkdirat\"]\n";
    let agent = agent_with(more, &["--init", "--", "sh", "-c", "cat /proc/self/status > status; sleep 1000"]);
    let status = "grep -E '^(CapEff|CapBnd|Seccomp:)' /proc/self/status; mkdir d || echo refused";
    for body in [json!({ "command": status }), json!({ "command": status, "uid": 1234 })] {
        let text = agent.post("/command", &body).text();
        for wanted in [
            "CapEff:\\t0000000000002000",
            "CapBnd:\\t0000000000002000",
            "Seccomp:\\t2",
            "refused",
            "not permitted",
        ] {
            assert!(text.contains(wanted), "{wanted} in {text}");
        }
    }
    let hardening = agent.get("/v1/isolated/capabilities").json()["hardening"].clone();
    assert_eq!(hardening["init_mode"], "subreaper");
    assert_eq!(
        (&hardening["cap_drop"]["state"], &hardening["seccomp"]["state"]),
        (&json!("active"), &json!("active"))
    );
    // The entrypoint has the same floor as commands. The last line says that all of the file is there.
    let status = until(|| {
        let text = fs::read_to_string(agent.agent.path("status")).ok()?;
        text.contains("nonvoluntary_ctxt_switches").then_some(text)
    });
    for wanted in ["CapEff:\t0000000000002000", "CapBnd:\t0000000000002000", "NoNewPrivs:\t1", "Seccomp:\t2"]
    {
        assert!(status.contains(wanted), "{wanted} in {status}");
    }
}

#[test]
fn landlock_confines_writes() {
    if !root() {
        return;
    }
    let agent = agent("[landlock]\nenabled = true\n");
    if agent.get("/v1/isolated/capabilities").json()["hardening"]["landlock"]["state"] == "unsupported" {
        return;
    }
    let code = format!(
        "touch /tmp/landlock-$$ && rm /tmp/landlock-$$ && echo tmp; cat /etc/passwd > /dev/null && echo read; echo >> /etc/passwd || echo kept; cp /bin/true {0}/t && {0}/t && echo ran",
        agent.path("space").display()
    );
    let text = agent.shell(&code).text();
    for wanted in ["\"tmp\"", "\"read\"", "\"kept\"", "\"ran\""] {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
}

#[test]
fn a_broken_isolation_file_stops_the_agent() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x.toml");
    fs::write(&file, "[hardening]\nenabled = maybe").unwrap();
    let port = crate::support::free_port().to_string();
    let done = std::process::Command::new(crate::support::BINARY)
        .args(["--port", &port, "--isolation-config", file.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(!done.status.success());
    assert!(String::from_utf8_lossy(&done.stderr).contains("isolation configuration"));
}
