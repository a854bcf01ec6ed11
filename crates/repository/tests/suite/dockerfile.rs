//! The Dockerfile reader: the language's corners, what is refused, and that no input breaks it.

use std::collections::BTreeMap;

use proptest::prelude::*;
use sandglass_repository::dockerfile::{
    CommandLine, CopySource, Dockerfile, Feature, Healthcheck, IgnoreFile, Instruction, Mount, NetworkMode,
    SANDBOX_ENGINE, Script, Sharing, Variables,
};

fn parse(text: &str) -> Dockerfile {
    Dockerfile::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn instructions(text: &str) -> Vec<Instruction> {
    let file = parse(&format!("FROM x\n{text}"));
    file.stages[0].instructions.iter().map(|located| located.instruction.clone()).collect()
}

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// Fills in every instruction of the only stage.
fn expanded(text: &str, given: &[(&str, &str)], base_env: &[(&str, &str)]) -> Vec<Instruction> {
    let file = parse(text);
    let mut variables =
        Variables::global(&file, &map(given), &BTreeMap::new()).unwrap().enter(&map(base_env));
    file.stages[0].instructions.iter().map(|located| variables.apply(located).unwrap()).collect()
}

#[test]
fn lines_are_joined_and_numbered() {
    let file = parse(
        "# syntax=docker/dockerfile:1.7\n# escape=`\n\n# a comment\nFROM x\nRUN a `\n# between\n\n  && b `\t\n  && c\nUSER me\n",
    );
    assert_eq!((file.syntax.as_deref(), file.escape), (Some("docker/dockerfile:1.7"), '`'));
    let stage = &file.stages[0];
    assert_eq!(stage.line, 5);
    let lines: Vec<_> =
        stage.instructions.iter().map(|located| (located.line, located.instruction.keyword())).collect();
    assert_eq!(lines, [(6, "RUN"), (11, "USER")]);
    let Instruction::Run(run) = &stage.instructions[0].instruction else { panic!() };
    assert_eq!(run.command, CommandLine::Shell("a   && b   && c".into()));
    // After anything else a directive is a comment.
    assert_eq!(parse("\n# escape=`\nFROM x").escape, '\\');
    assert_eq!(parse("# hello\n# escape=`\nFROM x").escape, '\\');
    // A doubled escape does not join, windows line ends do not matter.
    assert_eq!(instructions("RUN a \\\\\r\nUSER b\r\n").len(), 2);
    assert_eq!(instructions("\u{20}  run echo # no comment \\\n  here").len(), 1);
}

#[test]
fn here_documents_are_read_wherever_they_stand() {
    let read = instructions(
        "RUN <<EOF\nset -e\n# not a comment\necho \\\nEOF\nRUN cat <<-\"A\" <<B > /x\n\t\tone $x\n\tA\ntwo\nB\nUSER me\n",
    );
    let scripts: Vec<_> = read
        .iter()
        .filter_map(|instruction| match instruction {
            Instruction::Run(run) => Some((
                run.script(),
                run.heredocs.iter().map(|h| (h.name.clone(), h.expand)).collect::<Vec<_>>(),
            )),
            _ => None,
        })
        .collect();
    assert_eq!(scripts[0].0, Script::Shell("set -e\n# not a comment\necho \\\n".into()));
    assert_eq!(scripts[1].0, Script::Shell("cat <<-\"A\" <<B > /x\none $x\nA\ntwo\nB\n".into()));
    assert_eq!(scripts[1].1, [("A".to_owned(), false), ("B".to_owned(), true)]);
    assert_eq!(read.len(), 3);
    let Instruction::Run(run) = &instructions("RUN <<E\n#!/usr/bin/env python3\nprint(1)\nE")[0] else {
        panic!()
    };
    assert_eq!(run.script(), Script::Program("#!/usr/bin/env python3\nprint(1)\n".into()));
    // Not here-documents: quoted, shifted, and in instructions without them.
    assert_eq!(instructions("RUN echo \"<<EOF\"\nRUN echo $((1<<2)) <<<x\nENV A=<<EOF\nUSER me").len(), 4);
    let Instruction::Copy(copy) =
        &instructions("COPY --chmod=0644 a <<\"one.txt\" <<two /dest/\n$x\none.txt\n$y\ntwo\n")[0]
    else {
        panic!()
    };
    let CopySource::Inline(one) = &copy.sources[1] else { panic!() };
    assert_eq!((one.name.as_str(), one.expand, one.content.as_str()), ("one.txt", false, "$x\n"));
    assert_eq!(
        (copy.sources.len(), copy.destination.as_str(), copy.chmod.as_deref()),
        (3, "/dest/", Some("0644"))
    );
    assert!(Dockerfile::parse("FROM x\nRUN <<EOF\nnever\n").unwrap_err().message.contains("does not end"));
}

#[test]
fn every_instruction_is_read() {
    let text = r#"
ADD --checksum=sha256:24454f830cdb571e2c4ad15481119c43b3cafd48dd869a9b2945d1036d1dc68d https://x/y /y
ARG a b=1 c="two words"
CMD ["a", "b c"]
COPY --from=0 --chown=1:2 --link ["a b", "c/"]
ENTRYPOINT exec top -b
ENV A=1 B="two words" C=a\ b
ENV OLD one two  three
EXPOSE 80 443/tcp 8000-8010/udp
HEALTHCHECK --interval=1m30s --timeout=5s --retries=3 CMD curl -f localhost
HEALTHCHECK NONE
LABEL "a b"="c" d=e
MAINTAINER me <me@example.com>
ONBUILD COPY . /app
RUN ["x"]
SHELL ["/bin/bash", "-c"]
STOPSIGNAL SIGINT
USER 1000:1000
VOLUME ["/a b"]
VOLUME /a /b
WORKDIR /a b
"#;
    let read = instructions(text);
    assert_eq!(read.len(), 20);
    assert_eq!(read[2], Instruction::Cmd(CommandLine::Exec(vec!["a".into(), "b c".into()])));
    let Instruction::Copy(copy) = &read[3] else { panic!() };
    assert_eq!(
        (copy.sources.clone(), copy.destination.as_str()),
        (vec![CopySource::Path("a b".into())], "c/")
    );
    assert_eq!((copy.from.as_deref(), copy.chown.as_deref(), copy.link), (Some("0"), Some("1:2"), true));
    assert_eq!(read[4], Instruction::Entrypoint(CommandLine::Shell("exec top -b".into())));
    assert_eq!(read[6], Instruction::Env(vec![("OLD".into(), "one two  three".into())]));
    let Instruction::Healthcheck(Healthcheck::Command { interval, retries, .. }) = &read[8] else { panic!() };
    assert_eq!((interval.unwrap().as_secs(), *retries), (90, Some(3)));
    assert_eq!(read[9], Instruction::Healthcheck(Healthcheck::None));
    assert_eq!(read[17], Instruction::Volume(vec!["/a b".into()]));
    assert_eq!(read[18], Instruction::Volume(vec!["/a".into(), "/b".into()]));
    assert_eq!(read[19], Instruction::Workdir("/a b".into()));
    // What only begins like JSON is for the shell.
    assert_eq!(
        instructions("CMD [ -f x ] && y"),
        [Instruction::Cmd(CommandLine::Shell("[ -f x ] && y".into()))]
    );
}

#[test]
fn mounts_of_a_run_are_typed() {
    let text = "RUN --mount=type=cache,target=/c,sharing=locked,uid=1,mode=0700 --mount=type=secret,id=npm,required \
                --mount=type=secret,id=t,env=TOKEN --mount=target=/src --mount=type=bind,from=build,source=/o,target=/i,rw \
                --mount=type=tmpfs,target=/t,size=64m --mount=type=ssh --network=none make";
    let Instruction::Run(run) = &instructions(text)[0] else { panic!() };
    assert_eq!(
        run.mounts.iter().map(Mount::kind).collect::<Vec<_>>(),
        ["cache", "secret", "secret", "bind", "bind", "tmpfs", "ssh"]
    );
    let Mount::Cache(cache) = &run.mounts[0] else { panic!() };
    assert_eq!((cache.sharing, cache.uid, cache.mode), (Sharing::Locked, 1, 0o700));
    let (Mount::Secret(file), Mount::Secret(variable)) = (&run.mounts[1], &run.mounts[2]) else { panic!() };
    assert_eq!((file.target.as_deref(), file.required), (Some("/run/secrets/npm"), true));
    assert_eq!((variable.target.as_deref(), variable.env.as_deref()), (None, Some("TOKEN")));
    assert_eq!(
        run.mounts[3],
        Mount::Bind { target: "/src".into(), source: None, from: None, read_write: false }
    );
    assert_eq!(run.mounts[5], Mount::Tmpfs { target: "/t".into(), size: Some(64 << 20) });
    assert_eq!((run.network, run.command.clone()), (NetworkMode::None, CommandLine::Shell("make".into())));
}

#[test]
fn what_is_wrong_is_refused_with_its_line() {
    for (text, line, part) in [
        ("", 0, "no FROM"),
        ("RUN x", 1, "before the first FROM"),
        ("FROM", 1, "expected an image"),
        ("FROM a b", 1, "expected an image"),
        ("FROM a AS -x", 1, "name of a stage"),
        ("FROM a AS x\nFROM b AS X", 2, "taken"),
        ("FROM x\n\nFOO bar", 3, "\"FOO\" is not known"),
        ("FROM x\nRUN --mount=type=cache x", 2, "target is missing"),
        ("FROM x\nRUN --mount=type=foo,target=/x y", 2, "`foo` is not known"),
        ("FROM x\nRUN --mount=type=tmpfs,target=/x,id=1 y", 2, "option id is not known"),
        ("FROM x\nRUN --privileged x", 2, "--privileged is not known"),
        ("FROM x\nRUN", 2, "command is missing"),
        ("FROM x\nCOPY a", 2, "source and a destination"),
        ("FROM x\nCOPY --checksum=x a b", 2, "--checksum is not known"),
        ("FROM x\nCOPY --from=a --from=b c d", 2, "given twice"),
        ("FROM x\nENV", 2, "name is missing"),
        ("FROM x\nENV a=b c", 2, "has no `=`"),
        ("FROM x\nARG 1a", 2, "not a name"),
        ("FROM x\nSHELL bash", 2, "JSON array"),
        ("FROM x\nONBUILD FROM y", 2, "cannot be a trigger"),
        ("FROM x\nHEALTHCHECK curl", 2, "expected CMD"),
        ("FROM x\nHEALTHCHECK --interval=soon CMD x", 2, "not a duration"),
        ("# escape=x\nFROM y", 1, "neither"),
    ] {
        let error = Dockerfile::parse(text).expect_err(text);
        assert!(error.line == line && error.message.contains(part), "{text:?}: {error:?}");
    }
}

#[test]
fn variables_are_filled_in_as_the_builder_would() {
    let text = "ARG G=global\nFROM x\nARG G\nARG V=1.${W:-9}\nENV A=$V B=${A:-none} C='$V' D=\"$V \\$V\" E=\\$V\nENV B2=$A\nWORKDIR /x/$G\nLABEL l=${NOPE:+x}${A:+y}\nRUN echo $A\nCOPY a$V <<E /d/${A}\n$V '$V' \\$V\nE\nUSER ${U:?who}";
    let file = parse(text);
    let mut variables = Variables::global(&file, &map(&[("W", "7")]), &BTreeMap::new())
        .unwrap()
        .enter(&map(&[("PATH", "/bin")]));
    let all = &file.stages[0].instructions;
    let done: Vec<_> = all[..all.len() - 1].iter().map(|located| variables.apply(located).unwrap()).collect();
    let pairs = |list: &[(&str, &str)]| {
        list.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect::<Vec<_>>()
    };
    assert_eq!(
        done[2],
        Instruction::Env(pairs(&[("A", "1.9"), ("B", "none"), ("C", "$V"), ("D", "1.9 $V"), ("E", "$V")]))
    );
    assert_eq!(done[3], Instruction::Env(pairs(&[("B2", "1.9")])));
    assert_eq!(done[4], Instruction::Workdir("/x/global".into()));
    assert_eq!(done[5], Instruction::Label(pairs(&[("l", "y")])));
    let Instruction::Run(run) = &done[6] else { panic!() };
    assert_eq!(run.command, CommandLine::Shell("echo $A".into()), "the shell's business");
    let Instruction::Copy(copy) = &done[7] else { panic!() };
    assert_eq!(copy.sources[0], CopySource::Path("a1.9".into()));
    let CopySource::Inline(inline) = &copy.sources[1] else { panic!() };
    assert_eq!((inline.content.as_str(), copy.destination.as_str()), ("1.9 '1.9' $V\n", "/d/1.9"));
    let error = variables.apply(&all[all.len() - 1]).unwrap_err();
    assert!(error.message.contains("who") && error.line == 13, "{error:?}");
    assert_eq!(variables.run_environment()["V"], "1.9");
    assert_eq!(variables.env()["PATH"], "/bin");
}

#[test]
fn arguments_obey_scope_and_precedence() {
    let from = |text: &str, given: &[(&str, &str)]| {
        let file = parse(text);
        Variables::global(&file, &map(given), &map(&[("TARGETARCH", "arm64")])).unwrap().from(&file.stages[0])
    };
    assert_eq!(
        from("ARG T=1\nFROM --platform=linux/$TARGETARCH x:${T}", &[]).unwrap(),
        ("x:1".into(), Some("linux/arm64".into()))
    );
    assert_eq!(from("ARG T=1\nFROM x:${T}", &[("T", "2")]).unwrap().0, "x:2");
    assert!(from("ARG T\nFROM ${T}", &[]).unwrap_err().message.contains("empty"));
    // Not declared in the stage, not seen; the environment goes before an argument; a given value before the default.
    let user = |text: &str, given: &[(&str, &str)]| match expanded(text, given, &[("E", "env")]).pop() {
        Some(Instruction::User(user)) => user,
        other => panic!("{other:?}"),
    };
    assert_eq!(user("ARG G=1\nFROM x\nUSER u$G", &[]), "u");
    assert_eq!(user("FROM x\nARG E=arg\nUSER $E", &[("E", "given")]), "env");
    assert_eq!(user("FROM x\nARG A=default\nUSER $A", &[("A", "given")]), "given");
    let file = parse("ARG a\nFROM x\nARG b");
    assert_eq!(
        Variables::undeclared(&file, &map(&[("a", ""), ("b", ""), ("HTTP_PROXY", ""), ("typo", "")])),
        ["typo"]
    );
    // A value that doubles with each line is stopped.
    let bomb = format!("FROM x\nENV a=0123456789\n{}", "ENV a=$a$a\n".repeat(40));
    let file = parse(&bomb);
    let mut variables =
        Variables::global(&file, &BTreeMap::new(), &BTreeMap::new()).unwrap().enter(&BTreeMap::new());
    assert!(file.stages[0].instructions.iter().any(|located| variables.apply(located).is_err()));
    let odd = parse("FROM x\nENV a=${b%x}");
    let mut variables =
        Variables::global(&odd, &BTreeMap::new(), &BTreeMap::new()).unwrap().enter(&BTreeMap::new());
    assert!(variables.apply(&odd.stages[0].instructions[0]).unwrap_err().message.contains("${b%…}"));
}

#[test]
fn an_engine_learns_what_it_cannot_do() {
    let text = "# syntax=example/frontend\nFROM --platform=linux/arm64 a AS one\nRUN --mount=type=ssh --network=host --security=insecure x\n\
                RUN --mount=type=secret,id=a --mount=type=cache,target=/c y\nFROM scratch\nCOPY --from=one --link a b\nCOPY --from=alpine --parents a b\n\
                ADD https://x/y.tar.gz https://github.com/a/b.git local.tar.gz /z\nONBUILD RUN x\nCOPY --chmod=u=rwX a b\n";
    let file = parse(text);
    let unsupported: Vec<_> =
        file.unsupported(SANDBOX_ENGINE).into_iter().map(|used| (used.line, used.what)).collect();
    let expected: Vec<(usize, String)> = [
        (1, "# syntax=example/frontend"),
        (2, "FROM --platform=linux/arm64"),
        (3, "RUN --mount=type=ssh"),
        (3, "RUN --network=host"),
        (3, "RUN --security=insecure"),
        (7, "COPY --parents"),
        (8, "ADD https://x/y.tar.gz"),
        (8, "ADD https://github.com/a/b.git"),
        (9, "ONBUILD RUN"),
        (10, "COPY --chmod=u=rwX"),
    ]
    .map(|(line, what)| (line, what.to_owned()))
    .into();
    assert_eq!(unsupported, expected);
    assert!(file.features().iter().any(|used| used.feature == Feature::CopyFromImage && used.line == 7));
    assert_eq!(parse("# syntax=docker.io/docker/dockerfile:1@sha256:abc\nFROM x").features(), []);
    assert_eq!(parse("# syntax=docker/dockerfile:1-labs\nFROM x").features().len(), 1);
}

#[test]
fn targets_are_found_by_name_and_number() {
    let file = parse("FROM a AS Build\nFROM b\nFROM c AS last");
    assert_eq!(file.target(None).unwrap().image, "c");
    assert_eq!(file.target(Some("BUILD")).unwrap().image, "a");
    assert_eq!(file.target(Some("1")).unwrap().image, "b");
    assert!(file.target(Some("3")).is_none());
    assert_eq!(
        (file.earlier_stage("build", 1), file.earlier_stage("last", 2), file.earlier_stage("1", 1)),
        (Some(0), None, None)
    );
}

#[test]
fn ignore_files_leave_out_what_they_name() {
    let ignore = IgnoreFile::parse(
        "# comment\n*.log\n/node_modules/\n**/target\ndocs/**\n!docs/keep/*.md\nsecret?\n[ab].txt\na/../b/x\n",
    );
    for excluded in [
        "x.log",
        "node_modules",
        "node_modules/a/b",
        "target",
        "a/b/target/c",
        "docs/x",
        "docs/keep/x.txt",
        "secret1",
        "a.txt",
        "b/x",
    ] {
        assert!(ignore.excludes(excluded), "{excluded}");
    }
    for kept in ["a/x.log", "src/node_modules", "docs/keep/x.md", "secret", "secret12", "c.txt", "x"] {
        assert!(!ignore.excludes(kept), "{kept}");
    }
    assert!(ignore.may_include_below("docs") && !ignore.may_include_below("node_modules"));
    let all_but = IgnoreFile::parse("*\n!src\n");
    assert!(all_but.excludes("README") && !all_but.excludes("src/main.rs"));
}

proptest! {
    #[test]
    fn no_text_breaks_the_reader(text in "(?s).{0,200}") {
        let _ = Dockerfile::parse(&text);
        let _ = IgnoreFile::parse(&text).excludes(&text);
    }

    #[test]
    fn no_arguments_break_an_instruction(
        keyword in "(ADD|ARG|CMD|COPY|ENTRYPOINT|ENV|EXPOSE|FROM|HEALTHCHECK|LABEL|ONBUILD RUN|RUN|SHELL|USER|VOLUME|WORKDIR)",
        arguments in "([a-z=\"'$\\\\{}:?+<>,\\[\\]\n -]|<<E|--mount=|type=cache|\\$\\{x:-){0,30}",
    ) {
        if let Ok(file) = Dockerfile::parse(&format!("FROM x\n{keyword} {arguments}\nE\nE\n")) {
            let mut variables = Variables::global(&file, &BTreeMap::new(), &BTreeMap::new()).unwrap().enter(&BTreeMap::new());
            for located in &file.stages[0].instructions {
                prop_assert!(located.line >= 2);
                let _ = variables.apply(located);
            }
        }
    }

    #[test]
    fn a_value_in_single_quotes_comes_through_as_it_is(value in "[ -&(-~]{0,30}") {
        prop_assume!(!value.ends_with('\\'));
        let done = expanded(&format!("FROM x\nENV a='{value}'"), &[], &[]);
        prop_assert_eq!(&done[0], &Instruction::Env(vec![("a".into(), value)]));
    }

    #[test]
    fn patterns_without_wildcards_match_themselves_and_below(path in "[a-z]{1,5}(/[a-z]{1,5}){0,3}", below in "[a-z]{1,5}") {
        let ignore = IgnoreFile::parse(&path);
        prop_assert!(ignore.excludes(&path));
        let deeper = format!("{path}/{below}");
        prop_assert!(ignore.excludes(&deeper));
        let longer = format!("{path}{below}");
        prop_assert!(!ignore.excludes(&longer));
    }
}
