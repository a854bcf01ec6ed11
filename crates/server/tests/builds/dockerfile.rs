//! Builds of Dockerfiles.

use serde_json::json;

use super::harness::Stage;

const DOCKERFILE: &str = "\
FROM base AS tools
RUN make tools

FROM base
ARG VERSION=1
ENV APP_VERSION=$VERSION
WORKDIR /app
COPY src/ ./src/
COPY --from=tools /out/tool /usr/bin/
RUN --mount=type=secret,id=NPM_TOKEN make app
USER 1000:1000
EXPOSE 8080
LABEL team=web
ENTRYPOINT [\"/usr/bin/tool\"]
CMD [\"serve\"]
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stages_files_and_configuration_become_the_image() {
    let stage = Stage::new().await;
    stage.commit(&[
        ("Dockerfile", DOCKERFILE),
        ("src/main.rs", "x"),
        ("src/secret.key", "x"),
        (".dockerignore", "**/*.key\n"),
    ]);
    let asked = json!({
        "repository": { "url": stage.url() },
        "recipe": { "type": "dockerfile", "args": { "VERSION": "7" } },
        "secrets": { "NPM_TOKEN": "hunter2hunter2" },
    });
    let id = stage.call("POST", "/v1/image-builds", asked).await.json()["id"].as_str().unwrap().to_owned();
    let built = stage.ended(&id).await;
    let log = stage.get(&format!("/v1/image-builds/{id}/logs")).await.text;
    assert_eq!(built["status"]["state"], "Succeeded", "{built}\n{log}");
    assert_eq!(built["recipe"], "dockerfile");
    stage.when("only the image is kept", |stage| stage.images.made().len() == 1).await;
    let config = stage.images.config(&stage.images.made()[0]);
    let env: Vec<_> = config.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    assert_eq!(env, ["PATH=/bin", "APP_VERSION=7"]);
    assert_eq!((config.working_dir.as_str(), config.user.as_str()), ("/app", "1000:1000"));
    assert_eq!((config.entrypoint, config.cmd), (vec!["/usr/bin/tool".to_owned()], vec!["serve".to_owned()]));
    assert_eq!((config.exposed_ports, config.labels["team"].as_str()), (vec!["8080/tcp".to_owned()], "web"));
    let put = stage.inside.put.lock().unwrap().clone();
    for name in ["app/src/main.rs", "usr/bin/tool", "workspace/web/Dockerfile"] {
        assert!(put.iter().any(|there| there == name), "{name}: {put:?}");
    }
    assert!(!put.iter().any(|there| there == "app/src/secret.key"), "{put:?}");
    let ran = stage.inside.ran.lock().unwrap().clone();
    let app = ran.iter().find(|command| command.argv.iter().any(|word| word == "make app")).unwrap();
    assert_eq!((app.cwd.as_deref(), app.env["VERSION"].as_str()), (Some("/app"), "7"));
    assert!(log.contains("line 10: RUN"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_done_is_refused_by_name() {
    let stage = Stage::new().await;
    for (line, name) in [
        ("RUN --mount=type=ssh x", "RUN --mount=type=ssh"),
        ("ADD https://example.com/x /x", "ADD"),
        ("FROM scratch", "FROM scratch"),
        ("ONBUILD RUN x", "ONBUILD RUN"),
        ("COPY --from=other:1 /x /x", "COPY --from=other:1"),
    ] {
        stage.commit(&[("Dockerfile", &format!("FROM base\n{line}\n"))]);
        let answer =
            stage.call("POST", "/v1/image-builds", json!({"repository": {"url": stage.url()}})).await;
        assert_eq!((answer.status, answer.code().as_str()), (400, "REPOSITORY::INVALID_RECIPE"), "{line}");
        let message = answer.json()["message"].as_str().unwrap().to_owned();
        assert!(message.contains("Dockerfile: line 2") && message.contains(name), "{message}");
    }
    assert!(stage.inside.ran.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_run_names_its_line() {
    let stage = Stage::new().await;
    stage.commit(&[("Dockerfile", "FROM base\n\nRUN make all\n")]);
    *stage.inside.hook.lock().unwrap() = (vec!["boom".into()], 2);
    let asked = stage.call("POST", "/v1/image-builds", json!({"repository": {"url": stage.url()}})).await;
    let failed = stage.ended(asked.json()["id"].as_str().unwrap()).await;
    let failure = &failed["failure"];
    assert_eq!((&failure["step"], &failure["exitCode"]), (&json!("build"), &json!(2)), "{failed}");
    assert!(failure["message"].as_str().unwrap().contains("line 3"), "{failure}");
    assert!(stage.images.made().is_empty());
}
