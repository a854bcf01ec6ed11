//! How large a vault may become.

use http::Method;
use serde_json::{Value, json};

use crate::stack::conditions;
use crate::vault::{Api, binding, create};

#[test]
fn what_is_too_much_is_refused_and_changes_nothing() {
    let mut api = Api::new(conditions());
    let many = |count: usize, value: &str| -> Value {
        (0..count).map(|number| json!({"name": format!("c{number}"), "source": {"value": value}})).collect()
    };
    let holds = "credential vault is too large: it holds at most 512 credentials, 512 bindings and 262144 bytes of values";
    let first = json!({"credentials": many(513, "long enough")}).to_string();
    assert_eq!(api.call(Method::POST, "/credential-vault", &first), (413, holds.to_owned()));
    let first = json!({"credentials": many(2, &"x".repeat(140_000))}).to_string();
    assert_eq!(api.call(Method::POST, "/credential-vault", &first), (413, holds.to_owned()));
    assert_eq!(api.get("/credential-vault").0, 404);

    // One value in the headers of many requests.
    let headers: Value = (0..64).map(|n| json!({"name": format!("x-{n}"), "credential": "c0"})).collect();
    let bindings: Value = (0..8)
        .map(|n| {
            json!({"name": format!("b{n}"), "match": {"hosts": ["api.example.com"], "paths": [format!("/{n}")]},
                   "auth": {"type": "customHeaders", "headers": headers}})
        })
        .collect();
    let body = json!({"credentials": many(1, &"x".repeat(10_000)), "bindings": bindings}).to_string();
    let (status, text) = api.call(Method::POST, "/credential-vault", &body);
    assert_eq!(status, 413);
    assert!(text.contains("524288") && text.contains("4194304"), "{text}");
    // Many long placeholders.
    let substitutions: Value = (0..64)
        .map(|n| {
            let placeholder = format!("{n}{}", "{".repeat(2000));
            json!({"credential": "c0", "placeholder": placeholder, "in": ["path", "query", "body"]})
        })
        .collect();
    let binding = json!({"name": "b", "match": {"hosts": ["api.example.com"]},
        "auth": {"type": "passthrough", "substitutions": substitutions}});
    let body = json!({"credentials": many(1, "long enough"), "bindings": [binding]}).to_string();
    assert_eq!(api.call(Method::POST, "/credential-vault", &body), (413, text));
    assert_eq!(api.get("/credential-vault").0, 404);
}

#[test]
fn a_vault_grows_to_its_bounds_and_no_further() {
    let mut api = Api::new(conditions());
    assert_eq!(api.call(Method::POST, "/credential-vault", &create(&[])).0, 201);
    let mut status = 200;
    for round in 0..20 {
        let before = api.get("/credential-vault");
        // Bindings that no other overlaps, with as much text as one may have.
        let added: Value = (0..6)
            .map(|n| {
                let paths: Value =
                    (0..60).map(|p| format!("/{round}/{n}/{p}/{}", "p".repeat(1980))).collect();
                binding(&format!("b{round}-{n}"), json!({"hosts": ["api.example.com"], "paths": paths}))
            })
            .collect();
        let (found, text) =
            api.call(Method::PATCH, "/credential-vault", &json!({"bindings": {"add": added}}).to_string());
        status = found;
        if status != 200 {
            assert_eq!(
                text,
                "credential vault is too large: it holds at most 2097152 bytes of credentials and bindings"
            );
            assert_eq!(api.get("/credential-vault"), before);
            break;
        }
    }
    assert_eq!(status, 413);
}
