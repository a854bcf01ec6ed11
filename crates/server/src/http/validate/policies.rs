//! `policies` of a create: what the runtime cannot do is refused, never dropped.

use sandglass_api::lifecycle::{CreateSandboxRequest, PoliciesRequest};
use sandglass_sandbox::policy::{Action, DEFAULT_PRESENCE, DEFAULT_RESERVE, Idle, Policies};

use super::rules::RuntimeRules;
use crate::http::error::{ApiError, ApiResult, Code};

/// Idle times below this say more about heartbeats than about use.
const LEAST_IDLE_SECONDS: u64 = 10;

/// `None` when nothing was asked for that is not so anyway.
///
/// # Errors
/// 400 `SANDBOX::UNSUPPORTED_POLICY` for what the runtime cannot do, 400 `SANDBOX::INVALID_PARAMETER` for what makes no sense.
pub fn check(request: &CreateSandboxRequest, runtime: &RuntimeRules) -> ApiResult<Option<Policies>> {
    let Some(asked) = &request.policies else { return Ok(None) };
    let on_expire = action("onExpire", asked.on_expire.as_deref(), runtime)?;
    let idle_action = action("idleAction", asked.idle_action.as_deref(), runtime)?;
    let life = request.timeout.and_then(|seconds| u64::try_from(seconds).ok());
    let reserve = reserve(asked, on_expire, life)?;
    let idle = match seconds(asked.idle_timeout_seconds) {
        None | Some(0) => None,
        Some(timeout_seconds) => {
            check_idle(request, timeout_seconds)?;
            let max_presence_seconds =
                seconds(asked.max_presence_extension_seconds).unwrap_or(DEFAULT_PRESENCE.as_secs());
            Some(Idle { timeout_seconds, action: idle_action, max_presence_seconds })
        }
    };
    if on_expire == Action::Terminate && idle.is_none() {
        return Ok(None);
    }
    Ok(Some(Policies {
        on_expire,
        expire_reserve_seconds: reserve,
        idle,
        life_seconds: life,
        namespace: None,
    }))
}

fn seconds(asked: Option<i64>) -> Option<u64> {
    asked.and_then(|seconds| u64::try_from(seconds).ok())
}

fn unsupported(message: impl Into<String>) -> ApiError {
    ApiError::new(Code::UnsupportedPolicy, message)
}

fn action(field: &str, asked: Option<&str>, runtime: &RuntimeRules) -> ApiResult<Action> {
    let (action, can) = match asked {
        None | Some("terminate") => (Action::Terminate, true),
        Some("pause") => (Action::Pause, runtime.capabilities.pause),
        Some("snapshot") => (Action::Snapshot, runtime.capabilities.snapshot),
        Some(_) => return Err(ApiError::internal()),
    };
    if can {
        return Ok(action);
    }
    let message = format!("policies.{field}: the {} runtime cannot {}", runtime.name, action.word());
    Err(unsupported(message))
}

fn reserve(asked: &PoliciesRequest, on_expire: Action, life: Option<u64>) -> ApiResult<u64> {
    if on_expire == Action::Terminate {
        return Ok(0);
    }
    let Some(life) = life else {
        return Err(ApiError::invalid_parameter(
            "policies.onExpire other than `terminate` needs a timeout: without one the sandbox never expires",
        ));
    };
    match seconds(asked.expire_reserve_seconds) {
        Some(reserve) if reserve >= life => {
            Err(ApiError::invalid_parameter("policies.expireReserveSeconds must be less than timeout"))
        }
        Some(reserve) => Ok(reserve),
        None => Ok(DEFAULT_RESERVE.as_secs().min(life / 2)),
    }
}

fn check_idle(request: &CreateSandboxRequest, timeout: u64) -> ApiResult<()> {
    if request.repository.is_none() {
        // Only the agent of a workspace tells what goes on in it.
        return Err(unsupported(
            "policies.idleTimeoutSeconds needs a repository: of other sandboxes the server does not learn whether they are used",
        ));
    }
    let heartbeat = request.agent.as_ref().and_then(|agent| seconds(agent.heartbeat_interval_seconds));
    let least = LEAST_IDLE_SECONDS.max(heartbeat.unwrap_or(15) + 1);
    if timeout < least {
        let message = format!(
            "policies.idleTimeoutSeconds must be at least {least}: more than agent.heartbeatIntervalSeconds, with which use is told"
        );
        return Err(ApiError::invalid_parameter(message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::http::{decode, validate::rules::CreateRules};

    fn run(
        policies: Value,
        change: impl FnOnce(&mut Value),
        rules: &CreateRules,
    ) -> ApiResult<Option<Policies>> {
        let mut body = json!({
            "repository": {"url": "https://git.example.com/a/b"}, "timeout": 3600, "policies": policies,
        });
        change(&mut body);
        check(&decode::create::create(&body)?, &rules.runtime)
    }

    #[test]
    fn what_is_kept_of_what_was_asked_for() {
        let rules = CreateRules::docker(|_| {});
        let kept = run(
            json!({"onExpire": "snapshot", "expireReserveSeconds": 100, "idleTimeoutSeconds": 60,
                "idleAction": "pause", "maxPresenceExtensionSeconds": 900}),
            |_| {},
            &rules,
        );
        let idle = Idle { timeout_seconds: 60, action: Action::Pause, max_presence_seconds: 900 };
        let expected = Policies {
            on_expire: Action::Snapshot,
            expire_reserve_seconds: 100,
            idle: Some(idle),
            life_seconds: Some(3600),
            namespace: None,
        };
        assert_eq!(kept.unwrap(), Some(expected));
        let defaults = run(json!({"onExpire": "pause"}), |_| {}, &rules).unwrap().unwrap();
        assert_eq!(defaults.expire_reserve_seconds, 300);
        let short = run(json!({"onExpire": "pause"}), |body| body["timeout"] = json!(60), &rules);
        assert_eq!(short.unwrap().unwrap().expire_reserve_seconds, 30);
        for nothing in [
            json!({}),
            json!({"idleTimeoutSeconds": 0}),
            json!({"onExpire": "terminate", "idleAction": "pause"}),
        ] {
            assert_eq!(run(nothing, |_| {}, &rules).unwrap(), None);
        }
    }

    #[test]
    fn what_cannot_be_done_is_refused() {
        let (all, none) = (CreateRules::docker(|_| {}), CreateRules::embedded());
        let (parameter, policy) = ("SANDBOX::INVALID_PARAMETER", "SANDBOX::UNSUPPORTED_POLICY");
        let image = |body: &mut Value| {
            body.as_object_mut().unwrap().remove("repository");
            body["image"] = json!({"uri": "x"});
            body["entrypoint"] = json!(["x"]);
            body["resourceLimits"] = json!({});
        };
        for (policies, of_image, rules, code) in [
            (json!({"onExpire": "snapshot"}), false, &none, policy),
            (json!({"idleTimeoutSeconds": 60, "idleAction": "snapshot"}), false, &none, policy),
            (json!({"idleTimeoutSeconds": 60}), true, &all, policy),
            (json!({"idleTimeoutSeconds": 15}), false, &all, parameter),
            (json!({"onExpire": "pause", "expireReserveSeconds": 3600}), false, &all, parameter),
        ] {
            let change = |body: &mut Value| {
                if of_image {
                    image(body)
                }
            };
            let refused = run(policies.clone(), change, rules).unwrap_err();
            assert_eq!((refused.status.as_u16(), refused.code), (400, code), "{policies}: {refused}");
        }
        let for_ever = |body: &mut Value| drop(body.as_object_mut().unwrap().remove("timeout"));
        let refused = run(json!({"onExpire": "pause"}), for_ever, &all).unwrap_err();
        assert_eq!(refused.code, parameter);
        assert!(run(json!({"onExpire": "snapshot"}), image, &all).unwrap().is_some());
    }
}
