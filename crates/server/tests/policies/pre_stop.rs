//! The hook before the end.

use std::{
    path::Path,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use sandglass_server::builds::inside::{Command, Door, Inside, InsideError, Lines};
use sandglass_testkit::Fault;
use serde_json::{Value, json};

use super::{asked, events, gone, ready};
use crate::workspaces::{Fate, Stage};

/// Hooks that end as a test wants them to.
struct Hooks {
    ends: Mutex<Vec<Result<i32, &'static str>>>,
    ran: Mutex<Vec<Vec<String>>>,
}

#[async_trait]
impl Inside for Hooks {
    async fn run(&self, _: &Door, command: &Command, _: &mut Lines<'_>) -> Result<i32, InsideError> {
        self.ran.lock().unwrap().push(command.argv.clone());
        let ends = self.ends.lock().unwrap().pop();
        match ends {
            Some(Ok(code)) => Ok(code),
            Some(Err(why)) => Err(InsideError::Unreachable(why.into())),
            None => std::future::pending().await,
        }
    }

    async fn put(&self, _: &Door, _: &Path, _: &str, _: u32) -> Result<(), InsideError> {
        Err(InsideError::Refused("not here".into()))
    }

    async fn get(&self, _: &Door, _: &str, _: &Path) -> Result<(), InsideError> {
        Err(InsideError::Refused("not here".into()))
    }
}

#[tokio::test(start_paused = true)]
async fn the_hook_before_the_end_runs_once_and_never_blocks() {
    let stage = Stage::new(Fate::Found).await;
    let hooks = Arc::new(Hooks { ends: Mutex::new(vec![Err("gone"), Ok(3), Ok(0)]), ran: Mutex::default() });
    stage.service.engine.speak_through(hooks.clone(), std::net::Ipv4Addr::LOCALHOST.into());
    let body = || {
        let mut body = asked(json!({}), None);
        body["lifecycle"] = json!({"preStop": {"command": ["save", "all"], "timeoutSeconds": 20}});
        body
    };
    for (ended, kind) in [
        ("0", "sandbox.pre_stop"),
        ("it ended with 3", "sandbox.pre_stop_failed"),
        ("gone", "sandbox.pre_stop_failed"),
        ("it was not over within 20 s", "sandbox.pre_stop_failed"),
    ] {
        let (id, _agent) = ready(&stage, body()).await;
        // A removal that has to be tried again does not run it again.
        stage.service.runtime.inject("remove", Fault::Refuse);
        let before = hooks.ran.lock().unwrap().len();
        let _ = stage.delete(&id).await;
        gone(&stage, &id).await;
        let told = events(&stage, &id, kind).await;
        assert!(told.len() == 1 && told[0].to_string().contains(ended), "{told:?}");
        assert_eq!(hooks.ran.lock().unwrap().len(), before + 1);
        let order = stage.types(&id).await;
        let place = |of: &str| order.iter().position(|kind| kind == of);
        assert!(place(kind) < place("sandbox.terminated"), "{order:?}");
    }
    assert_eq!(hooks.ran.lock().unwrap()[0], ["save", "all"]);
    // What is frozen is not thawed for it.
    let (id, _agent) = ready(&stage, body()).await;
    assert_eq!(
        stage.service.call("POST", &format!("/v1/sandboxes/{id}/pause"), Value::Null).await.status,
        202
    );
    assert_eq!(stage.delete(&id).await, 204);
    assert!(events(&stage, &id, "sandbox.pre_stop_failed").await[0].to_string().contains("frozen"));
    let wrong = json!({"image": {"uri": "i"}, "entrypoint": ["x"], "resourceLimits": {},
        "lifecycle": {"preStop": {"command": ["x"], "timeoutSeconds": 61}}});
    assert_eq!(stage.service.call("POST", "/v1/sandboxes", wrong).await.status, 422);
}
