//! Recipes: which one holds, what each says, and what is refused by name.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use sandglass_repository::recipe::{
    Base, Command, Origin, Problem, Recipe, RecipeError, RecipeKind, RecipeRequest, Step, Tree, detect,
};
use tempfile::TempDir;

fn checkout(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (path, text) in files {
        write(folder.path(), path, text);
    }
    folder
}

fn write(folder: &Path, path: &str, text: &str) {
    let path = folder.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn read_as(folder: &TempDir, request: &str) -> Result<Recipe, RecipeError> {
    let request: RecipeRequest = serde_json::from_str(request).unwrap();
    detect(&Tree::open(folder.path()).unwrap(), &request, "/workspace/web")
}

fn auto(files: &[(&str, &str)]) -> Result<Recipe, RecipeError> {
    read_as(&checkout(files), r#"{"type":"auto"}"#)
}

fn shell(name: &str, text: &str) -> Step {
    Step { name: name.into(), command: Command::Shell(text.into()) }
}

fn script(path: &str) -> Step {
    Step { name: path.into(), command: Command::Script(path.into()) }
}

#[test]
fn sources_are_looked_at_in_their_order() {
    let all = [
        (".sandbox.yml", "image: debian:12\n"),
        (".devcontainer/devcontainer.json", r#"{"image":"a"}"#),
        (".devcontainer.json", r#"{"image":"b"}"#),
        ("Dockerfile", "FROM c"),
        (".sandbox/setup.sh", "true"),
        (".openinspect/setup.sh", "false"),
        (".openinspect/start.sh", "true"),
    ];
    let at = |from: usize| auto(&all[from..]).unwrap();
    assert_eq!((at(0).kind, at(0).base), (RecipeKind::Hooks, Base::Image("debian:12".into())));
    assert_eq!(at(0).setup, [script(".sandbox/setup.sh")], "a manifest without commands keeps the hooks");
    assert_eq!((at(1).kind, at(1).base), (RecipeKind::Devcontainer, Base::Image("a".into())));
    assert_eq!(at(1).passed_over, [".sandbox/setup.sh", ".openinspect/setup.sh", ".openinspect/start.sh"]);
    assert_eq!(
        (at(2).origin, at(2).base),
        (Origin::File(".devcontainer.json".into()), Base::Image("b".into()))
    );
    assert_eq!(at(3).kind, RecipeKind::Dockerfile);
    assert_eq!(
        (at(3).setup, at(3).start),
        (vec![script(".sandbox/setup.sh")], vec![script(".openinspect/start.sh")])
    );
    assert_eq!((at(4).kind, at(4).setup), (RecipeKind::Hooks, vec![script(".sandbox/setup.sh")]));
    assert_eq!((at(5).kind, at(5).setup), (RecipeKind::Hooks, vec![script(".openinspect/setup.sh")]));
    assert_eq!(
        (at(6).kind, at(6).setup, at(6).start),
        (RecipeKind::Hooks, vec![], vec![script(".openinspect/start.sh")])
    );
    assert_eq!((at(7).kind, at(7).origin, at(7).base), (RecipeKind::None, Origin::Nothing, Base::Default));
}

#[test]
fn a_request_goes_before_everything() {
    let folder = checkout(&[
        (".sandbox.yml", "nonsense: ["),
        ("Dockerfile", "FROM a AS one\nFROM b"),
        ("x/start.sh", ""),
    ]);
    assert!(read_as(&folder, r#"{"type":"auto"}"#).is_err());
    let recipe = read_as(&folder, r#"{"type":"dockerfile","target":"one","args":{"a":"b"}}"#).unwrap();
    let Base::Dockerfile { path, context, target, args } = recipe.base else { panic!() };
    assert_eq!(
        (path.as_str(), context.as_str(), target.as_deref(), args["a"].as_str()),
        ("Dockerfile", "", Some("one"), "b")
    );
    assert!(
        read_as(&folder, r#"{"type":"dockerfile","target":"two"}"#).unwrap_err().message.contains("no stage")
    );
    assert!(read_as(&folder, r#"{"type":"devcontainer"}"#).is_err());
    assert_eq!(
        read_as(&folder, r#"{"type":"hooks","start":"x/start.sh"}"#).unwrap().start,
        [script("x/start.sh")]
    );
    assert!(read_as(&folder, r#"{"type":"hooks","setup":"../setup.sh"}"#).is_err());
    assert!(read_as(&folder, r#"{"type":"hooks"}"#).is_err());
    assert_eq!(read_as(&folder, r#"{"type":"none","image":"x"}"#).unwrap().base, Base::Image("x".into()));
    assert!(serde_json::from_str::<RecipeRequest>(r#"{"type":"none","setup":"x"}"#).is_err());
}

#[test]
fn a_manifest_says_everything_in_one_file() {
    let text = "version: 1\ndockerfile:\n  path: docker/Dockerfile\n  context: .\n  target: dev\n  args: {NODE: '22'}\nsetup: npm ci\n\
                start: [npm, run, dev]\nenv: {A: b}\nuser: node\nports: [3000]\nlockFiles: [deps.txt, later.txt]\n\
                allowTokens: [private-key]\n";
    let recipe = auto(&[
        (".sandbox.yml", text),
        ("docker/Dockerfile", "FROM x AS dev\nCOPY package.json ./\nCOPY src /src\n"),
        ("package.json", "{}"),
        ("package-lock.json", "{}"),
        ("src/main.js", ""),
        ("deps.txt", "1"),
    ])
    .unwrap();
    assert_eq!((recipe.kind, &recipe.origin), (RecipeKind::Dockerfile, &Origin::File(".sandbox.yml".into())));
    assert_eq!(recipe.setup, [shell("setup", "npm ci")]);
    assert_eq!(recipe.start[0].command, Command::Exec(vec!["npm".into(), "run".into(), "dev".into()]));
    assert_eq!(
        (recipe.container_env["A"].as_str(), recipe.remote_user.as_deref(), recipe.ports.as_slice()),
        ("b", Some("node"), &[3000][..])
    );
    let files: Vec<_> = recipe.files.keys().map(String::as_str).collect();
    assert_eq!(
        files,
        [".sandbox.yml", "deps.txt", "docker/Dockerfile", "later.txt", "package-lock.json", "package.json"]
    );
    for (wrong, part) in [
        ("version: 2\n", "version"),
        ("image: a\ndockerfile: Dockerfile\n", "only one of"),
        ("imagee: a\n", "imagee"),
        ("ports: [0]\n", "not a port"),
        ("dockerfile: ../Dockerfile\n", "out of the repository"),
        ("dockerfile: nothing\n", "not in the repository"),
        ("devcontainer: nothing.json\n", "not in the repository"),
        ("setup: {a: {b: c}}\n", "setup"),
        (
            "a: &a [x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\nimage: [*c,*c,*c,*c]\n",
            "",
        ),
    ] {
        let error = auto(&[(".sandbox.yml", wrong)]).expect_err(wrong);
        assert!(error.to_string().contains(part), "{wrong}: {error}");
    }
    let deep = format!("setup: {}x{}\n", "[".repeat(5000), "]".repeat(5000));
    assert!(auto(&[(".sandbox.yml", &deep)]).is_err());
    let container = auto(&[
        (".sandbox.yml", "devcontainer: x/devcontainer.json\nstart: go\n"),
        ("x/devcontainer.json", r#"{"image":"a"}"#),
    ])
    .unwrap();
    assert_eq!((container.kind, container.start), (RecipeKind::Devcontainer, vec![shell("start", "go")]));
}

#[test]
fn a_devcontainer_is_read_whole() {
    let text = r#"
// JSON with comments
{
  "name": "web", /* for people */
  "build": { "dockerfile": "Dockerfile", "context": "..", "args": { "V": "22" }, "target": "dev" },
  "features": { "./tool": { "version": "3", "with-extra": true } },
  "onCreateCommand": ["npm", "ci"],
  "updateContentCommand": "npm run prebuild",
  "postCreateCommand": { "server": "make server", "client": ["make", "client"], "none": "" },
  "postStartCommand": "cd ${containerWorkspaceFolder} && echo ${HOME} ${localWorkspaceFolderBasename}",
  "forwardPorts": [3000, "localhost:5432"],
  "containerEnv": { "A": "${localEnv:A:none}" },
  "remoteEnv": { "PATH": "${containerEnv:PATH}:/x", "GONE": null },
  "remoteUser": "node",
  "customizations": { "vscode": { "extensions": ["x"] } },
  "workspaceFolder": "/workspaces/${localWorkspaceFolderBasename}",
  "mounts": [], "privileged": false,
}"#;
    let files = [
        (".devcontainer/devcontainer.json", text),
        (".devcontainer/Dockerfile", "FROM x AS dev\nCOPY .tool-versions /\n"),
        (".tool-versions", "node 22"),
        (
            ".devcontainer/tool/devcontainer-feature.json",
            r#"{"id":"tool","version":"1.0.0","options":{"version":{"type":"string","default":"1"},"with-extra":{"type":"boolean","default":false},"9x":{"type":"string","default":"d"}},"containerEnv":{"T":"1"}}"#,
        ),
        (".devcontainer/tool/install.sh", "echo"),
        ("yarn.lock", ""),
    ];
    let recipe = auto(&files).unwrap();
    let Base::Dockerfile { path, context, target, args } = &recipe.base else { panic!() };
    assert_eq!(
        (path.as_str(), context.as_str(), target.as_deref(), args["V"].as_str()),
        (".devcontainer/Dockerfile", "", Some("dev"), "22")
    );
    let names: Vec<_> = recipe.setup.iter().map(|step| step.name.as_str()).collect();
    assert_eq!(names, ["onCreateCommand", "updateContentCommand", "postCreateCommand"]);
    let Command::Parallel(parallel) = &recipe.setup[2].command else { panic!() };
    assert_eq!(parallel.keys().collect::<Vec<_>>(), ["client", "server"]);
    assert_eq!(recipe.start, [shell("postStartCommand", "cd /workspace/web && echo ${HOME} web")]);
    assert_eq!(recipe.ports, [3000, 5432]);
    assert_eq!(recipe.container_env["A"], "none");
    assert_eq!(recipe.remote_env["PATH"].as_deref(), Some("${containerEnv:PATH}:/x"));
    assert_eq!(recipe.remote_env["GONE"], None);
    assert_eq!(recipe.passed_over, ["customizations", "name"]);
    let feature = &recipe.features[0];
    let options: BTreeMap<_, _> = feature.options.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
    assert_eq!(options, BTreeMap::from([("VERSION", "3"), ("WITH_EXTRA", "true"), ("_X", "d")]));
    assert_eq!((feature.folder.as_str(), feature.container_env["T"].as_str()), (".devcontainer/tool", "1"));
    assert_eq!(recipe.files.len(), files.len());
}

#[test]
fn what_a_devcontainer_cannot_have_is_refused_by_name() {
    for (text, part) in [
        (r#"{"dockerComposeFile":"x.yml","service":"a"}"#, "dockerComposeFile"),
        (r#"{"image":"a","runArgs":["--privileged"]}"#, "runArgs"),
        (r#"{"image":"a","privileged":true}"#, "privileged"),
        (r#"{"image":"a","mounts":["x"]}"#, "mounts"),
        (r#"{"image":"a","initializeCommand":"id"}"#, "initializeCommand"),
        (r#"{"image":"a","postAttachCommand":"id"}"#, "postAttachCommand"),
        (r#"{"image":"a","capAdd":["SYS_PTRACE"]}"#, "capAdd"),
        (r#"{"image":"a","hostRequirements":{"cpus":4}}"#, "hostRequirements"),
        (r#"{"image":"a","madeUp":1}"#, "madeUp"),
        (
            r#"{"image":"a","features":{"ghcr.io/devcontainers/features/node:1":{}}}"#,
            "ghcr.io/devcontainers/features/node:1",
        ),
        (r#"{"image":"a","forwardPorts":["db:5432"]}"#, "db:5432"),
        (r#"{"image":"a","workspaceFolder":"/elsewhere"}"#, "workspaceFolder"),
        (r#"{"image":"a","containerEnv":{"A":"${localEnv:SECRET}"}}"#, "${localEnv:SECRET}"),
        (r#"{"image":"a","containerEnv":{"A":"${containerEnv:PATH}"}}"#, "${containerEnv:PATH}"),
        (r#"{"build":{"dockerfile":"Dockerfile","options":["--network=host"]}}"#, "build.options"),
    ] {
        let error = auto(&[(".devcontainer.json", text)]).expect_err(text);
        assert!(error.problem == Problem::Unsupported && error.message.contains(part), "{text}: {error}");
    }
    for (text, part) in [
        ("{", ""),
        ("[]", "object"),
        ("", "object"),
        ("{image: 'a'}", ""),
        (r#"{"image":"a" "x":1}"#, ""),
        (r"{}", "neither image nor"),
        (r#"{"image":"a","build":{"dockerfile":"x"}}"#, "both"),
        (r#"{"image":1}"#, "image"),
        (r#"{"image":"a","postCreateCommand":[1]}"#, "postCreateCommand"),
        (r#"{"image":"a","forwardPorts":[70000]}"#, "70000"),
        (r#"{"build":{"dockerfile":"../../etc/passwd"}}"#, "out of the repository"),
        (r#"{"build":{"dockerfile":"/etc/passwd"}}"#, "absolute"),
        (r#"{"image":"a","features":{"./nope":{}}}"#, "not in the repository"),
    ] {
        let error = auto(&[(".devcontainer.json", text)]).expect_err(text);
        assert!(error.problem != Problem::Unsupported && error.message.contains(part), "{text}: {error}");
    }
    let deep = format!("{{\"image\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(auto(&[(".devcontainer.json", &deep)]).is_err());
}

#[test]
fn no_link_leads_out_of_the_checkout() {
    let outside = checkout(&[
        ("Dockerfile", "FROM stolen"),
        ("devcontainer.json", r#"{"image":"stolen"}"#),
        ("tool/install.sh", ""),
    ]);
    for (link, target) in [
        ("Dockerfile", outside.path().join("Dockerfile")),
        (".devcontainer", outside.path().to_owned()),
        (".sandbox.yml", "/etc/passwd".into()),
        (".sandbox.yml", "/proc/self/environ".into()),
    ] {
        let folder = checkout(&[("README", "")]);
        symlink(target, folder.path().join(link)).unwrap();
        let error = read_as(&folder, r#"{"type":"auto"}"#).expect_err(link);
        assert_eq!(error.problem, Problem::Escape, "{link}: {error}");
    }
    let folder = checkout(&[("docker/real", "FROM inside")]);
    symlink("docker/real", folder.path().join("Dockerfile")).unwrap();
    assert_eq!(
        read_as(&folder, r#"{"type":"auto"}"#).unwrap().kind,
        RecipeKind::Dockerfile,
        "a link that stays inside is fine"
    );
    let looped = checkout(&[]);
    symlink("Dockerfile", looped.path().join("Dockerfile")).unwrap();
    assert!(read_as(&looped, r#"{"type":"auto"}"#).is_err());
    let feature = checkout(&[(".devcontainer.json", r#"{"image":"a","features":{"./tool":{}}}"#)]);
    symlink(outside.path().join("tool"), feature.path().join("tool")).unwrap();
    assert!(read_as(&feature, r#"{"type":"auto"}"#).is_err());
    let inside = checkout(&[
        (".devcontainer.json", r#"{"image":"a","features":{"./tool":{}}}"#),
        ("tool/devcontainer-feature.json", r#"{"id":"t"}"#),
        ("tool/install.sh", ""),
    ]);
    symlink("/etc/passwd", inside.path().join("tool/key")).unwrap();
    assert!(read_as(&inside, r#"{"type":"auto"}"#).is_err());
    // What a Dockerfile copies is the build's business; it is not looked at from here.
    let copied = checkout(&[("Dockerfile", "FROM x\nCOPY key large plain /\n"), ("plain", "1")]);
    symlink("/etc/passwd", copied.path().join("key")).unwrap();
    fs::File::create(copied.path().join("large")).unwrap().set_len(600 << 20).unwrap();
    let files = read_as(&copied, r#"{"type":"auto"}"#).unwrap().files;
    assert_eq!(
        (files["key"].as_str(), files["large"].as_str(), files["plain"].len()),
        ("unread", "unread", 64)
    );
}

#[test]
fn what_a_recipe_reads_decides_its_digests_and_what_runs_later_does_not() {
    let base = [("Dockerfile", "FROM x\nCOPY a.txt /"), ("a.txt", "1"), (".sandbox/start.sh", "1")];
    let files = |change: (&str, &str)| {
        let folder = checkout(&base);
        write(folder.path(), change.0, change.1);
        let recipe = read_as(&folder, r#"{"type":"auto"}"#).unwrap();
        (recipe.files.clone(), recipe.parameters())
    };
    let same = files(("README", "x"));
    assert_ne!(files(("a.txt", "2")).0, same.0);
    assert_ne!(files(("Dockerfile", "FROM x\nCOPY a.txt /\n")).0, same.0);
    assert_ne!(files((".dockerignore", "x")).0, same.0);
    assert_eq!(files((".sandbox/start.sh", "2")), same);
    assert_eq!(files(("unrelated", "2")), same);
    assert_ne!(files((".sandbox/setup.sh", "2")), same);
}
