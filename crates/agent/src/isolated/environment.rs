//! Which variables a session sees.
//!
//! Invariant: what configures the agent itself is in no session, whatever a request lists.

use super::request::Passthrough;
use crate::envs::Env;

const NEVER: [&str; 8] = [
    "EXECD_ACCESS_TOKEN",
    "EXECD_ENVS",
    "EXECD_ISOLATION_CONFIG",
    "EXECD_LIFECYCLE_CONFIG",
    "EXECD_RUNTIME_INIT",
    "JUPYTER_HOST",
    "JUPYTER_TOKEN",
    "OPENSANDBOX_LIFECYCLE",
];
const SECRET_ENDS: [&str; 4] = ["_API_KEY", "_TOKEN", "_SECRET", "_PASSWORD"];
const SECRET_STARTS: [&str; 5] = ["AWS_", "ALI_", "ALIYUN_", "K8S_", "KUBE_"];

pub(super) fn filter(mut env: Env, passthrough: &Passthrough) -> Env {
    env.retain(|name, _| {
        let listed = |keys: &Vec<String>| keys.iter().any(|key| key == name);
        let passes = match passthrough {
            Passthrough::Usual => !looks_secret(name),
            Passthrough::Deny(keys) => !listed(keys),
            Passthrough::Allow(keys) => listed(keys),
        };
        passes && !NEVER.iter().any(|never| name.eq_ignore_ascii_case(never))
    });
    env
}

fn looks_secret(name: &str) -> bool {
    SECRET_ENDS.iter().any(|end| name.ends_with(end))
        || SECRET_STARTS.iter().any(|start| name.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(passthrough: &Passthrough) -> Vec<String> {
        let all =
            ["PATH", "OPENAI_API_KEY", "AWS_REGION", "KUBE_X", "TOKEN", "execd_envs", "JUPYTER_TOKEN", "A"];
        let env: Env = all.map(|name| (name.to_owned(), "x".to_owned())).into();
        filter(env, passthrough).into_keys().collect()
    }

    #[test]
    fn secrets_stay_outside_unless_they_are_asked_for() {
        assert_eq!(names(&Passthrough::Usual), ["A", "PATH", "TOKEN"]);
        let deny = Passthrough::Deny(vec!["A".into()]);
        assert_eq!(names(&deny), ["AWS_REGION", "KUBE_X", "OPENAI_API_KEY", "PATH", "TOKEN"]);
        let allow = Passthrough::Allow(vec!["AWS_REGION".into(), "JUPYTER_TOKEN".into(), "none".into()]);
        assert_eq!(names(&allow), ["AWS_REGION"]);
    }
}
