//! Cache keys: their values for all time, and everything they have to notice.

use std::collections::BTreeMap;

use sandglass_repository::key::{Key, RecipeInputs, build_key};
use serde_json::{Value, json};

#[derive(Clone)]
struct Inputs {
    repositories: Vec<(String, String)>,
    recipe_type: &'static str,
    parameters: Value,
    files: BTreeMap<String, String>,
    base_digest: &'static str,
    build_args: BTreeMap<String, String>,
    secret_versions: BTreeMap<String, String>,
    platform: &'static str,
    agent_generation: u32,
}

impl Inputs {
    fn key(&self) -> Key {
        RecipeInputs {
            repositories: &self.repositories,
            recipe_type: self.recipe_type,
            parameters: &self.parameters,
            files: &self.files,
            base_digest: self.base_digest,
            build_args: &self.build_args,
            secret_versions: &self.secret_versions,
            platform: self.platform,
            agent_generation: self.agent_generation,
        }
        .recipe_key()
    }
}

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn inputs() -> Inputs {
    Inputs {
        repositories: vec![
            ("https://github.com/acme/web.git".into(), "/workspace/web".into()),
            ("ssh://git@github.com/acme/api.git".into(), "/workspace/api".into()),
        ],
        recipe_type: "dockerfile",
        parameters: json!({"kind": "dockerfile", "base": {"dockerfile": {"target": null}}}),
        files: map(&[("package-lock.json", "11"), ("Dockerfile", "22")]),
        base_digest: "sha256:aa",
        build_args: map(&[("NODE", "22"), ("ünï", "\"q\"\n")]),
        secret_versions: map(&[("NPM_TOKEN", "v2")]),
        platform: "linux/amd64",
        agent_generation: 3,
    }
}

/// Computed by another program from the canonical form as it is described. A change here throws every cached image away.
#[test]
fn the_golden_vectors_hold() {
    let recipe = inputs().key();
    assert_eq!(recipe.as_str(), "c0dd77a4a4e9dc726a28b3bb890fca8ee7ef1c65103f511c121f3d321b75a060");
    assert_eq!(recipe.short(), "c0dd77a4a4e9");
    let commits = map(&[("/workspace/web", &"a".repeat(40)), ("/workspace/api", &"b".repeat(40))]);
    let key = build_key(&recipe, &commits);
    assert_eq!(key.as_str(), "8871063433eb3e75430fdd22e184f46436d83428cc367f7399237a985c589d76");
    let empty = Inputs {
        repositories: vec![],
        recipe_type: "none",
        parameters: Value::Null,
        files: map(&[]),
        base_digest: "",
        build_args: map(&[]),
        secret_versions: map(&[]),
        platform: "",
        agent_generation: 0,
    };
    assert_eq!(empty.key().as_str(), "4e4de72d3c61f99f6c5c22b0d11114ee3edda7461a53d64b28dabc37c4669baa");
}

#[test]
fn every_input_changes_the_key() {
    type Change = (&'static str, fn(&mut Inputs));
    let changes: Vec<Change> = vec![
        ("case of an address", |inputs| inputs.repositories[0].0 = "https://github.com/Acme/web.git".into()),
        ("order of repositories", |inputs| inputs.repositories.swap(0, 1)),
        ("path", |inputs| inputs.repositories[0].1 = "/workspace/Web".into()),
        ("one repository less", |inputs| drop(inputs.repositories.pop())),
        ("type", |inputs| inputs.recipe_type = "hooks"),
        ("target", |inputs| inputs.parameters["base"]["dockerfile"]["target"] = json!("dev")),
        ("lock file", |inputs| drop(inputs.files.insert("package-lock.json".into(), "12".into()))),
        ("new file", |inputs| drop(inputs.files.insert("yarn.lock".into(), "11".into()))),
        ("file gone", |inputs| drop(inputs.files.remove("package-lock.json"))),
        ("base", |inputs| inputs.base_digest = "sha256:ab"),
        ("build argument", |inputs| drop(inputs.build_args.insert("NODE".into(), "23".into()))),
        ("case of a build argument", |inputs| drop(inputs.build_args.insert("node".into(), "22".into()))),
        ("secret's version", |inputs| drop(inputs.secret_versions.insert("NPM_TOKEN".into(), "v3".into()))),
        ("secret more", |inputs| drop(inputs.secret_versions.insert("OTHER".into(), "v1".into()))),
        ("platform", |inputs| inputs.platform = "linux/arm64"),
        ("agent", |inputs| inputs.agent_generation = 4),
        // Where one field ends and the next begins.
        ("value moved", |inputs| {
            let value = inputs.build_args.remove("NODE").unwrap();
            inputs.files.insert("NODE".into(), value);
        }),
    ];
    let original = inputs().key();
    let mut seen = vec![original.clone()];
    for (what, change) in changes {
        let mut changed = inputs();
        change(&mut changed);
        let key = changed.key();
        assert!(!seen.contains(&key), "{what}");
        seen.push(key);
    }
    assert_eq!(inputs().key(), original);
}

#[test]
fn the_order_of_members_does_not_matter_and_that_of_items_does() {
    let with =
        |parameters: &str| Inputs { parameters: serde_json::from_str(parameters).unwrap(), ..inputs() }.key();
    assert_eq!(with(r#"{"a":1,"b":{"c":2,"d":3}}"#), with(r#"{"b":{"d":3,"c":2},"a":1}"#));
    assert_ne!(with(r#"{"a":[1,2]}"#), with(r#"{"a":[2,1]}"#));
    assert_ne!(with(r#"{"a":"1"}"#), with(r#"{"a":1}"#));
}

#[test]
fn a_build_key_follows_its_commits_and_recipe() {
    let recipe = inputs().key();
    let key =
        |web: &str, api: &str| build_key(&recipe, &map(&[("/workspace/web", web), ("/workspace/api", api)]));
    assert_eq!(key("a", "b"), key("a", "b"));
    assert_ne!(key("a", "b"), key("b", "a"));
    assert_ne!(key("a", "b"), recipe);
    let other = Inputs { agent_generation: 9, ..inputs() }.key();
    assert_ne!(build_key(&other, &map(&[("/workspace/web", "a"), ("/workspace/api", "b")])), key("a", "b"));
}
