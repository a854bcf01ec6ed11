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

const PLAIN: &str = "FROM base\nCOPY src/ /src/\nRUN make\nHEALTHCHECK CMD true\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_with_a_builder_builds_what_its_builder_understands() {
    let stage = Stage::with_builder().await;
    stage.commit(&[("Dockerfile", PLAIN), ("src/main.rs", "x"), ("big", "x"), (".dockerignore", "big\n")]);
    let asked = json!({ "repository": { "url": stage.url() }, "recipe": { "type": "dockerfile" } });
    let id = stage.call("POST", "/v1/image-builds", asked).await.json()["id"].as_str().unwrap().to_owned();
    let built = stage.ended(&id).await;
    let log = stage.get(&format!("/v1/image-builds/{id}/logs")).await.text;
    assert_eq!(built["status"]["state"], "Succeeded", "{built}\n{log}");
    assert!(log.contains("Step 1/1 : RUN make\n"), "{log}");
    let asked = stage.dockerfiles.as_ref().unwrap().built.lock().unwrap().clone();
    let [(wanted, context)] = &asked[..] else { panic!("{asked:?}") };
    assert_eq!((wanted.dockerfile.as_str(), &wanted.target), ("Dockerfile", &None));
    for name in ["Dockerfile", ".dockerignore", "src/main.rs"] {
        assert!(context.iter().any(|there| there == name), "{name}: {context:?}");
    }
    assert!(!context.iter().any(|there| there == "big"), "{context:?}");
    // What the builder made goes, what was captured of it stays; nothing of it tells of the box.
    stage.when("only the image is kept", |stage| stage.images.made().len() == 1).await;
    let config = stage.images.config(&stage.images.made()[0]);
    assert_eq!((config.user.as_str(), config.labels.get("role")), ("app", None));
    assert!(stage.inside.put.lock().unwrap().iter().any(|name| name == "workspace/web/src/main.rs"));
    assert_eq!(stage.inside.times("make"), 0);

    stage.commit(&[("Dockerfile", "FROM base\nRUN --mount=type=cache,target=/c make\n")]);
    let refused = json!({ "repository": { "url": stage.url() } });
    let refused = stage.call("POST", "/v1/image-builds", refused).await;
    assert!(
        refused.status != 202
            || stage.ended(refused.json()["id"].as_str().unwrap()).await["status"]["state"] == "Failed"
    );
    stage.commit(&[("Dockerfile", "FROM base\nRUN --mount=type=secret,id=T,required=false make all\n")]);
    let asked = json!({ "repository": { "url": stage.url() } });
    let id = stage.call("POST", "/v1/image-builds", asked).await.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(stage.ended(&id).await["status"]["state"], "Succeeded");
    assert_eq!(stage.dockerfiles.as_ref().unwrap().built.lock().unwrap().len(), 1);
    assert_eq!(stage.inside.times("make all"), 1);
}

/// How a build of this Dockerfile ends: refused or failed with a text, or `None`.
async fn refused(stage: &Stage, dockerfile: &str) -> Option<String> {
    stage.commit(&[("Dockerfile", dockerfile), ("x", "x")]);
    let asked = json!({ "repository": { "url": stage.url() } });
    let answer = stage.call("POST", "/v1/image-builds", asked).await;
    if answer.status >= 400 {
        return Some(answer.text);
    }
    let ended = stage.ended(answer.json()["id"].as_str().unwrap()).await;
    (ended["status"]["state"] != "Succeeded").then(|| ended.to_string())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_builder_gets_nothing_that_may_download() {
    let stage = Stage::with_builder().await;
    let builder = stage.dockerfiles.clone().unwrap();
    for text in ["ONBUILD ADD http://h/x /x", "ADD https://h/x /x", "ONBUILD ADD $U /x"] {
        let said = refused(&stage, &format!("FROM base\n{text}\n")).await.expect(text);
        assert!(said.contains("is not supported"), "{said}");
    }
    // In a sandbox an address is the name of a file that is not there.
    assert!(refused(&stage, "FROM base\nARG U=http://h/x\nADD $U /x\n").await.is_some());
    assert!(refused(&stage, "FROM base AS q\nONBUILD COPY --from=other /x /x\nFROM q\n").await.is_some());
    assert!(refused(&stage, "FROM base\nFROM 0\n").await.is_some());
    let triggers = |trigger: &str| {
        let triggers = [("base".to_owned(), vec![trigger.to_owned()])];
        *builder.triggers.lock().unwrap() = triggers.into();
    };
    triggers("ADD http://h/x /x");
    let said = refused(&stage, "FROM base\nRUN one\n").await.unwrap();
    assert!(said.contains("ONBUILD ADD http://h/x"), "{said}");
    assert!(builder.built.lock().unwrap().is_empty());
    triggers("RUN npm ci");
    assert_eq!(refused(&stage, "FROM base\nRUN two\n").await, None);
    // Nobody's in particular: what earlier builds made may be taken.
    let built = builder.built.lock().unwrap();
    assert!(!built[0].0.fresh && built[0].0.dockerfile == "Dockerfile");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instruction_that_fails_in_the_builder_is_the_builds_failure() {
    let stage = Stage::with_builder().await;
    *stage.dockerfiles.as_ref().unwrap().code.lock().unwrap() = 7;
    stage.commit(&[("Dockerfile", PLAIN), ("src/main.rs", "x")]);
    let asked = json!({ "repository": { "url": stage.url() } });
    let id = stage.call("POST", "/v1/image-builds", asked).await.json()["id"].as_str().unwrap().to_owned();
    let failed = stage.ended(&id).await;
    let failure = &failed["failure"];
    assert_eq!((&failure["step"], &failure["exitCode"]), (&json!("build"), &json!(7)), "{failed}");
    assert_eq!((stage.images.made().len(), &failed["attempt"]), (0, &json!(1)));
    assert!(stage.runtime.boxes().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_build_whose_image_somebody_removed_is_tried_again() {
    let stage = Stage::with_builder().await;
    *stage.dockerfiles.as_ref().unwrap().disturbed.lock().unwrap() = 1;
    stage.commit(&[("Dockerfile", PLAIN), ("src/main.rs", "x")]);
    let asked = json!({ "repository": { "url": stage.url() } });
    let id = stage.call("POST", "/v1/image-builds", asked).await.json()["id"].as_str().unwrap().to_owned();
    let built = stage.ended(&id).await;
    assert_eq!((&built["status"]["state"], &built["attempt"]), (&json!("Succeeded"), &json!(2)), "{built}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instructions_run_again_from_the_first_that_has_changed() {
    let mut stage = Stage::new().await;
    let file = "FROM base AS tools\nRUN make tools\n\nFROM base\nARG LEVEL=1\nRUN make one\nSHELL [\"/bin/ash\", \"-c\"]\n\
                ENV A=b\nCOPY src ./src/\nRUN make two\nCOPY --from=tools /out/tool /usr/bin/\nRUN make three\nCMD serve\n";
    stage.commit(&[("Dockerfile", file), ("src/a", "1"), ("README", "1")]);
    let counts = |stage: &Stage| {
        ["make tools", "make one", "make two", "make three"].map(|word| stage.inside.times(word))
    };
    let mut log = built(&stage).await;
    assert_eq!((counts(&stage), stage.images.layers()), ([1, 1, 1, 1], 4), "{log}");
    stage.commit(&[("README", "2")]);
    log = built(&stage).await;
    assert_eq!(counts(&stage), [1, 1, 1, 1], "{log}");
    assert!(log.contains("line 12: RUN, as before"), "{log}");
    stage.commit(&[("src/a", "2")]);
    stage.restart().await;
    log = built(&stage).await;
    assert_eq!(counts(&stage), [1, 1, 2, 2], "{log}");
    assert!(log.contains("line 6: RUN, as before") && log.contains("--- line 9: COPY ---"), "{log}");
    // What was said before counts for what runs, and for the image.
    let ran = stage.inside.ran.lock().unwrap().clone();
    let two = ran.iter().rev().find(|command| command.argv.iter().any(|word| word == "make two")).unwrap();
    assert_eq!((two.argv[0].as_str(), two.env["A"].as_str()), ("/bin/ash", "b"));
    let made = stage.images.made();
    assert!(
        made.len() == 3
            && made.iter().all(|name| stage.images.config(name).cmd == ["/bin/ash", "-c", "serve"])
    );
    // A chain that another stage is part of changes with it.
    stage.commit(&[("Dockerfile", &file.replace("RUN make tools", "RUN make tools all"))]);
    log = built(&stage).await;
    assert_eq!(counts(&stage), [2, 1, 2, 3], "{log}");
    stage.when("the build sandboxes are removed", |stage| stage.runtime.boxes().is_empty()).await;
}

async fn built(stage: &Stage) -> String {
    let asked =
        stage.call("POST", "/v1/image-builds", json!({"repository": {"url": stage.url()}})).await.json();
    let id = asked["id"].as_str().unwrap_or_else(|| panic!("{asked}")).to_owned();
    let built = stage.ended(&id).await;
    let log = stage.get(&format!("/v1/image-builds/{id}/logs")).await.text;
    assert_eq!(built["status"]["state"], "Succeeded", "{built}\n{log}");
    log
}
