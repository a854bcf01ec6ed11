//! Builds that start from the image of an older commit, and devcontainers.

use serde_json::{Value, json};

use super::harness::Stage;

async fn build(stage: &Stage, extra: Value) -> (Value, String) {
    let mut body = json!({ "repository": { "url": stage.url() } });
    body.as_object_mut().unwrap().extend(extra.as_object().cloned().unwrap_or_default());
    let asked = stage.call("POST", "/v1/image-builds", body).await.json();
    let id = asked["id"].as_str().unwrap_or_else(|| panic!("{asked}")).to_owned();
    let built = stage.ended(&id).await;
    let log = stage.get(&format!("/v1/image-builds/{id}/logs")).await.text;
    assert_eq!(built["status"]["state"], "Succeeded", "{built}\n{log}");
    (built, log)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn setup_runs_again_on_the_image_of_the_older_commit() {
    let stage = Stage::new().await;
    stage.commit(&[(".sandbox/setup.sh", "npm ci\n"), ("src/old", "x")]);
    let (first, _) = build(&stage, Value::Null).await;
    assert_eq!(first["cache"], json!({"hit": false}), "{first}");
    stage.commit(&[("src/new", "y")]);
    let (second, log) = build(&stage, Value::Null).await;
    assert_eq!(second["cache"], json!({"hit": false, "parentImageId": first["imageId"]}));
    assert!(log.contains("starting from osb-img-"), "{log}");
    assert_eq!(stage.inside.times("setup.sh"), 2);
    assert_eq!(stage.inside.times("sandglass-sources"), 1, "what the commit took away goes");
    let put = stage.inside.put.lock().unwrap().clone();
    assert!(put.iter().any(|name| name == "workspace/web/.git/sandglass-sources"), "{put:?}");
    stage.when("the build sandboxes are removed", |stage| stage.runtime.boxes().is_empty()).await;

    // The same commit by force is made from its base.
    let (third, log) = build(&stage, json!({"force": true})).await;
    assert_eq!((&third["cache"], log.contains("starting from")), (&json!({"hit": false}), false), "{log}");

    // An image that cannot be built upon costs time, not the build.
    stage.commit(&[("src/newer", "z")]);
    *stage.inside.answers.lock().unwrap() = vec![("sandglass-sources", Vec::new(), 3)];
    let (fourth, log) = build(&stage, Value::Null).await;
    assert_eq!(fourth["attempt"], 1, "{fourth}");
    assert!(log.contains("it cannot be built upon") && log.contains("starting from the base"), "{log}");
    stage.when("the build sandboxes are removed", |stage| stage.runtime.boxes().is_empty()).await;

    // Another recipe has no older image.
    stage.commit(&[(".sandbox/setup.sh", "npm ci --all\n")]);
    let (other, _) = build(&stage, Value::Null).await;
    assert_eq!(other["cache"], json!({"hit": false}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_devcontainers_features_and_commands_run_in_their_order() {
    let stage = Stage::new().await;
    stage.commit(&[
        (
            ".devcontainer/devcontainer.json",
            r#"{
                // What editors alone understand is passed over.
                "customizations": {"vscode": {}},
                "image": "base",
                "features": {"./tool": {"version": "7"}},
                "containerEnv": {"A": "b"},
                "remoteEnv": {"PATH": "${containerEnv:PATH}:/tool"},
                "onCreateCommand": "make one",
                "updateContentCommand": ["make two", "x"],
                "postCreateCommand": {"a": "make three"},
                "postStartCommand": "make start"
            }"#,
        ),
        (
            ".devcontainer/tool/devcontainer-feature.json",
            r#"{"id": "tool", "version": "1.0.0", "name": "Tool", "options": {"version": {"type": "string", "default": "1"}},
                "containerEnv": {"TOOL": "yes"}}"#,
        ),
        (".devcontainer/tool/install.sh", "echo installing\n"),
    ]);
    let (built, log) = build(&stage, Value::Null).await;
    assert_eq!(built["recipe"], "devcontainer", "{built}");
    let ran = stage.inside.ran.lock().unwrap().clone();
    let place = |word: &str| {
        ran.iter()
            .position(|command| command.argv.iter().any(|part| part.contains(word)))
            .unwrap_or_else(|| panic!("{word}: {log}"))
    };
    let order = ["tool/install.sh", "make one", "make two", "make three"].map(place);
    assert!(order.is_sorted(), "{order:?}");
    assert_eq!((ran[order[0]].env["VERSION"].as_str(), ran[order[0]].ids), ("7", Some((0, 0))));
    let one = &ran[order[1]];
    assert_eq!(
        (one.env["A"].as_str(), one.env["TOOL"].as_str(), one.env["PATH"].as_str()),
        ("b", "yes", "/bin:/tool")
    );
    assert_eq!(one.cwd.as_deref(), Some("/workspace/web"));
    assert_eq!(stage.inside.times("make start"), 0, "that is for each boot");
    let config = stage.images.config(&stage.images.made()[0]);
    assert!(
        config.env.contains(&("TOOL".into(), "yes".into())) && config.env.contains(&("A".into(), "b".into()))
    );

    // The image of the older commit has the features already.
    stage.commit(&[("x", "y")]);
    let (next, _) = build(&stage, Value::Null).await;
    assert_eq!(next["cache"]["parentImageId"], built["imageId"]);
    assert_eq!((stage.inside.times("tool/install.sh"), stage.inside.times("make one")), (1, 2));
}
