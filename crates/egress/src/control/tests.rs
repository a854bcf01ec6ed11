use std::sync::Arc;

use tempfile::TempDir;

use super::*;
use crate::plane::Dependent;
use crate::policy::{Action, Rules};
use crate::rehearsal::{Free, Kernel, Rehearsal, settings};

/// Lends something to this host.
struct Lends(&'static str);

impl Dependent for Lends {
    fn accepts(&self, rules: &dyn Rules) -> Result<(), String> {
        match rules.name(self.0).action {
            Action::Allow => Ok(()),
            Action::Deny => {
                Err(format!("binding \"git\" lends to {}, which the policy does not allow", self.0))
            }
        }
    }
}

struct NoVault;

impl VaultRoutes for NoVault {
    fn answer(&self, request: &Request) -> Answer {
        Answer::plain(StatusCode::OK, &request.path)
    }
}

struct Stand {
    control: Control,
    kernel: Kernel,
    folder: TempDir,
}

impl Stand {
    fn new(token: Option<&str>, rules: &str, dependent: impl Dependent + 'static) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let settings = settings(&[
            ("OPENSANDBOX_EGRESS_RULES", rules),
            ("OPENSANDBOX_EGRESS_POLICY_FILE", &path("policy.json")),
            ("OPENSANDBOX_EGRESS_MAX_RULES", "3"),
            ("SANDGLASS_EGRESS_ALWAYS_DIR", &path("always")),
        ]);
        let Rehearsal { plane, kernel, .. } = Rehearsal::new(&settings, dependent);
        let control = Control {
            token: token.map(Secret::new),
            plane,
            vault: Box::new(NoVault),
            health: Arc::default(),
        };
        Self { control, kernel, folder }
    }

    fn open(rules: &str) -> Self {
        Self::new(None, rules, Lends("lent.test"))
    }

    fn send(&self, method: Method, path: &str, body: &str) -> Answer {
        let request = Request {
            method,
            path: path.into(),
            headers: HeaderMap::new(),
            body: body.into(),
            peer: [127, 0, 0, 1].into(),
        };
        self.control.answer(&request)
    }

    fn policy(&self, method: Method, body: &str) -> (u16, String) {
        let answer = self.send(method, "/policy", body);
        let json = answer.content_type == "application/json";
        assert_eq!(json, answer.status.is_success(), "errors are text, successes JSON");
        assert_eq!(!json, answer.body.ends_with('\n'));
        (answer.status.as_u16(), answer.body)
    }

    fn stored(&self) -> Option<String> {
        std::fs::read_to_string(self.folder.path().join("policy.json")).ok()
    }

    /// Everything that says what is in force: the API, the file, the rules that gates ask.
    fn everything(&self) -> (String, Option<String>, Action) {
        let rules = self.control.plane.lock().unwrap().rules();
        (self.policy(Method::GET, "").1, self.stored(), rules.name("lent.test").action)
    }
}

const LENT: &str = r#"{"egress":[{"action":"allow","target":"lent.test"}]}"#;

#[test]
fn the_policy_is_shown_as_it_was_set() {
    let stand = Stand::open(LENT);
    assert_eq!(
        stand.policy(Method::GET, ""),
        (200, r#"{"status":"ok","mode":"enforcing","enforcementMode":"dns+nft","policy":{"egress":[{"action":"allow","target":"lent.test"}],"defaultAction":"deny"}}"#.into())
    );
    let (status, body) = stand.policy(Method::PUT, r#"{"defaultAction":"Allow"}"#);
    assert_eq!(
        (status, body.as_str()),
        (200, r#"{"status":"ok","mode":"allow_all","enforcementMode":"dns+nft"}"#)
    );
    assert!(stand.policy(Method::GET, "").1.ends_with(r#""policy":{"egress":[],"defaultAction":"allow"}}"#));
    assert_eq!(stand.stored().unwrap(), "{\n  \"egress\": [],\n  \"defaultAction\": \"allow\"\n}\n");
}

#[test]
fn an_empty_body_resets_and_a_binding_in_use_prevents_it() {
    let stand = Stand::new(None, "", Free);
    let reset = r#"{"status":"ok","mode":"deny_all","reason":"policy reset to default deny-all"}"#;
    assert_eq!(stand.policy(Method::POST, " "), (200, reset.into()));

    let stand = Stand::open(LENT);
    for (method, body) in [
        (Method::PUT, ""),
        (Method::PUT, "{}"),
        (Method::DELETE, r#"["lent.test"]"#),
        (Method::PATCH, r#"[{"action":"deny","target":"lent.test"}]"#),
    ] {
        let before = stand.everything();
        let (status, told) = stand.policy(method, body);
        assert_eq!(status, 400);
        assert!(told.contains("lent.test"), "{told}");
        assert_eq!(stand.everything(), before);
    }
}

#[test]
fn patches_and_deletions() {
    let stand = Stand::open(LENT);
    let (status, _) = stand.policy(
        Method::PATCH,
        r#"[{"action":"deny","target":"a.test"},{"target":"A.test","action":"allow"}]"#,
    );
    assert_eq!(status, 200);
    let (_, shown) = stand.policy(Method::GET, "");
    assert!(
        shown.contains(r#"[{"action":"deny","target":"a.test"},{"action":"allow","target":"lent.test"}]"#)
    );
    let (status, told) = stand.policy(Method::DELETE, r#"["b.test"]"#);
    assert_eq!(status, 200);
    assert!(told.contains(r#""reason":"no matching targets found""#));
    let (status, told) = stand.policy(Method::DELETE, r#"[" A.TEST "]"#);
    assert_eq!(status, 200);
    assert!(!told.contains("reason"));
    assert!(!stand.stored().unwrap().contains("a.test"));
}

#[test]
fn what_is_wrong_is_refused_in_plain_text() {
    let stand = Stand::open(LENT);
    for (method, body, status) in [
        (Method::PUT, "[]", 400),
        (Method::PUT, "{", 400),
        (Method::PUT, r#"{"defaultAction":"x"}"#, 400),
        (Method::PATCH, "", 400),
        (Method::PATCH, "{}", 400),
        (Method::PATCH, "[]", 400),
        (Method::PATCH, r#"[{"action":"allow","target":""}]"#, 400),
        (Method::DELETE, "", 400),
        (Method::DELETE, "[]", 400),
        (Method::DELETE, "[{}]", 400),
        (Method::PATCH, r#"[{"target":"1"},{"target":"2"},{"target":"3"}]"#, 413),
    ] {
        let before = stand.everything();
        assert_eq!(stand.policy(method, body).0, status, "{body}");
        assert_eq!(stand.everything(), before);
    }
    let answer = stand.send(Method::HEAD, "/policy", "");
    assert_eq!(answer.status, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(answer.allow, Some("GET, POST, PUT, PATCH, DELETE"));
    assert_eq!(stand.send(Method::GET, "/policy/", "").status, StatusCode::NOT_FOUND);
}

#[test]
fn a_kernel_that_fails_leaves_everything_as_it_was() {
    let stand = Stand::open(LENT);
    let more = r#"[{"action":"allow","target":"192.0.2.1"}]"#;
    for broken in ["apply", "cut"] {
        let before = stand.everything();
        stand.kernel.lock().broken = Some(broken);
        let (status, told) = stand.policy(Method::PATCH, more);
        assert_eq!(status, 500);
        assert!(told.starts_with("cannot put the policy into the kernel: no "), "{told}");
        stand.kernel.lock().broken = None;
        assert_eq!(stand.everything(), before);
        let last = stand.kernel.lock().plans.last().unwrap().clone();
        assert!(last.networks.is_empty(), "the kernel has the old rules");
    }
    assert_eq!(stand.policy(Method::PATCH, more).0, 200);
    assert_eq!(stand.kernel.lock().plans.last().unwrap().networks.len(), 1);
}

#[test]
fn a_file_that_cannot_be_written_leaves_everything_as_it_was() {
    let stand = Stand::open(LENT);
    let plans = stand.kernel.lock().plans.len();
    std::fs::create_dir(stand.folder.path().join("policy.json")).unwrap();
    let (status, told) = stand.policy(Method::PUT, r#"{"defaultAction":"allow"}"#);
    assert_eq!(status, 500);
    assert!(told.starts_with("cannot store the policy: "), "{told}");
    assert_eq!(stand.kernel.lock().plans.len(), plans);
    assert!(stand.policy(Method::GET, "").1.contains("lent.test"));
}

#[test]
fn the_token_is_asked_for_everywhere_but_for_health() {
    let stand = Stand::new(Some("hush"), LENT, Free);
    let with = |token: &str, path: &str| {
        let mut headers = HeaderMap::new();
        headers.insert(TOKEN, token.parse().unwrap());
        let path = path.to_owned();
        let peer = [127, 0, 0, 1].into();
        stand.control.answer(&Request { method: Method::GET, path, headers, body: Vec::new(), peer })
    };
    for path in ["/policy", "/credential-vault", "/credential-vault/bindings/x"] {
        for wrong in ["", "hus", "hush!", "HUSH"] {
            let answer = with(wrong, path);
            assert_eq!((answer.status.as_u16(), answer.body.as_str()), (401, "unauthorized\n"));
        }
        assert_eq!(stand.send(Method::PUT, path, "").status, StatusCode::UNAUTHORIZED);
        assert_eq!(with("hush", path).status, StatusCode::OK);
    }
    for path in ["/credential-vault/_active", "/credential-vault/%5Factive", "/%63redential-vault%2f_active"]
    {
        for shown in ["", "wrong", "hush"] {
            let answer = with(shown, path);
            assert_eq!(
                (answer.status.as_u16(), answer.body.as_str()),
                (403, "forbidden\n"),
                "{path} {shown}"
            );
        }
        assert_eq!(stand.send(Method::PUT, path, "").status, StatusCode::FORBIDDEN);
    }
    assert_eq!(stand.send(Method::GET, "/credential-vaults", "").status, StatusCode::NOT_FOUND);
    let unready = stand.send(Method::GET, "/healthz", "");
    assert_eq!((unready.status.as_u16(), unready.body.as_str()), (503, "mitmproxy not ready"));
    stand.control.health.set_ready();
    let ready = stand.send(Method::GET, "/healthz", "");
    assert_eq!((ready.status.as_u16(), ready.body.as_str()), (200, "ok"));
}
