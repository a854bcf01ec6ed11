//! From create to nothing left, also when things go wrong on the way.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sandglass_shim::client::{Client, read_report};
use sandglass_shim::protocol::{CreateReport, Request};
use sandglass_shim::spec::{Bind, BoxSpec, ExitCause, Graft, MutableFacts, Phase};
use sandglass_shim::{Zygote, end_by_id, shim_alive, teardown};

use crate::stage::{SHIM, TestBox, eventually, skip, stage, traces, write_facts};

const NOTHING: Vec<String> = Vec::new();

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

fn now_ms() -> i64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as i64
}

#[test]
fn a_box_starts_answers_and_leaves_nothing() {
    let stage = stage();
    let boxed = stage.boxed();
    println!("timings: {:?}", boxed.timings);
    assert_eq!(boxed.state.phase, Phase::Running);
    assert!(shim_alive(&boxed.dir).unwrap());
    assert_eq!(boxed.run("echo hello; exit 3"), ("hello".into(), 3));
    let usage = boxed.ask(Request::State).usage.unwrap();
    assert!(
        usage.pids.unwrap() >= 2 && usage.memory_bytes.unwrap() > 0 && usage.cpu_usec.unwrap() > 0,
        "{usage:?}"
    );
    let begun = Instant::now();
    let answer = boxed.remove();
    println!("removal took {:?}", begun.elapsed());
    assert!(answer.ok, "{answer:?}");
    assert_eq!(traces(&boxed.spec, &boxed.dir), NOTHING);
    assert!(!boxed.dir.exists());
    eventually("the shim has ended", || !Path::new(&format!("/proc/{}", boxed.state.shim_pid)).exists());
}

#[test]
fn a_create_without_a_zygote_is_the_same() {
    let stage = stage();
    let spec = stage.spec();
    let dir = stage.prepare(&spec, &MutableFacts::default());
    let (mut channel, mut child) = sandglass_shim::create::run(Path::new(SHIM), &dir).unwrap();
    let Some(CreateReport::Created { state, timings }) = read_report(&mut channel).unwrap() else {
        panic!("not created");
    };
    let boxed = TestBox { dir, spec, state, timings };
    assert_eq!(boxed.run("echo hello").0, "hello");
    assert!(boxed.remove().ok);
    assert!(child.wait().unwrap().success());
    assert_eq!(traces(&boxed.spec, &boxed.dir), NOTHING);
}

#[test]
fn the_entrypoint_s_output_and_exit_code_are_kept() {
    let stage = stage();
    let script = "echo out; echo err >&2; echo $OPENSANDBOX_ID; printf 'no end'; sleep 0.1; exit 7";
    let boxed = stage.boxed_with(|spec| {
        spec.process.entrypoint = vec!["/bin/sh".into(), "-c".into(), script.into()];
    });
    let state = boxed.wait_exited();
    let exit = state.exit.unwrap();
    assert_eq!((exit.code, exit.signal, exit.cause), (Some(7), None, ExitCause::Exited));
    let log = fs::read_to_string(boxed.dir.join("console.log")).unwrap();
    let lines: Vec<(&str, &str)> =
        log.lines().map(|line| line.split_once(' ').unwrap().1.split_once(' ').unwrap()).collect();
    assert!(lines.contains(&("stdout", "out")) && lines.contains(&("stderr", "err")), "{log}");
    assert!(lines.contains(&("stdout", &boxed.spec.id)) && lines.contains(&("stdout", "no end")), "{log}");
    assert_eq!(boxed.event_kinds(), ["created", "started", "exited"]);
    // The directory and the shim stay, everything else is gone already.
    assert_eq!(traces(&boxed.spec, &boxed.dir.join("root")), NOTHING);
    assert!(shim_alive(&boxed.dir).unwrap());
    assert!(boxed.remove().ok);
    assert_eq!(traces(&boxed.spec, &boxed.dir), NOTHING);
}

#[test]
fn a_flood_of_output_is_rotated_and_loses_nothing() {
    let stage = stage();
    let boxed = stage.boxed_with(|spec| {
        let script = "yes 0123456789012345678901234567890123456789 | head -n 200000";
        spec.process.entrypoint = vec!["/bin/sh".into(), "-c".into(), script.into()];
    });
    let begun = Instant::now();
    assert!(boxed.ask(Request::State).ok);
    assert!(begun.elapsed() < Duration::from_secs(60), "the flood delays clients");
    boxed.wait_exited();
    let size = |name: &str| fs::metadata(boxed.dir.join(name)).unwrap().size();
    assert!(size("console.log.1") >= 8 << 20 && size("console.log.1") < 9 << 20);
    let lines = ["console.log.1", "console.log"]
        .map(|name| fs::read_to_string(boxed.dir.join(name)).unwrap().lines().count());
    assert_eq!(lines[0] + lines[1], 200_000);
}

#[test]
fn a_full_disk_makes_the_writer_wait_and_nobody_else() {
    let stage = stage();
    let mut spec = stage.spec();
    let script = "yes 0123456789012345678901234567890123456789 | head -n 20000; echo last";
    spec.process.entrypoint = vec!["/bin/sh".into(), "-c".into(), script.into()];
    let dir = stage.prepare(&spec, &MutableFacts::default());
    std::os::unix::fs::symlink("/dev/full", dir.join("console.log")).unwrap();
    let mut channel = stage.zygote.create(&dir).unwrap();
    let Some(CreateReport::Created { state, timings }) = read_report(&mut channel).unwrap() else {
        panic!("not created");
    };
    let boxed = TestBox { dir, spec, state, timings };
    std::thread::sleep(Duration::from_millis(300));
    let begun = Instant::now();
    assert_eq!(boxed.current().phase, Phase::Running, "the writer must wait");
    assert!(begun.elapsed() < Duration::from_secs(60));
    fs::remove_file(boxed.dir.join("console.log")).unwrap();
    boxed.wait_exited();
    eventually("all output has arrived", || {
        let log = fs::read_to_string(boxed.dir.join("console.log")).unwrap_or_default();
        log.lines().count() == 20_001 && log.trim_end().ends_with("stdout last")
    });
}

#[test]
fn a_late_shim_does_not_revive_a_box_that_was_given_up() {
    let stage = stage();
    let spec = stage.spec();
    let dir = stage.prepare(&spec, &MutableFacts::default());
    teardown(&dir).unwrap();
    let mut channel = stage.zygote.create(&dir).unwrap();
    let report = read_report(&mut channel).unwrap().unwrap();
    assert!(matches!(&report, CreateReport::Failed { phase, .. } if phase == "exists"), "{report:?}");
    assert_eq!(traces(&spec, &dir), NOTHING);
    sandglass_shim::remove_dir(&dir).unwrap();
    teardown(&dir).unwrap();
}

#[test]
fn an_entrypoint_that_cannot_start_is_named() {
    let stage = stage();
    let mut spec = stage.spec();
    spec.process.entrypoint = vec!["/no/such/program".into()];
    let (phase, message) = stage.create(spec.clone()).err().unwrap();
    assert_eq!(phase, "entrypoint");
    assert!(message.contains("/no/such/program"), "{message}");
    let dir = stage.home.join("sandboxes").join(&spec.id);
    let state: sandglass_shim::spec::BoxState =
        serde_json::from_slice(&fs::read(dir.join("state.json")).unwrap()).unwrap();
    assert_eq!(state.exit.unwrap().cause, ExitCause::EntrypointFailed);
}

#[test]
fn an_agent_that_dies_early_is_quoted() {
    let stage = stage();
    let mut spec = stage.spec();
    spec.process.entrypoint = vec!["@die".into()];
    let (phase, message) = stage.create(spec).err().unwrap();
    assert_eq!(phase, "process");
    assert!(message.contains("dying as told"), "{message}");
}

#[test]
fn a_failure_in_any_phase_leaves_nothing() {
    let stage = stage();
    for phase in ["cgroup", "process", "rootfs", "network", "exec"] {
        let mut spec = stage.spec();
        spec.about = serde_json::json!({ "failAt": phase });
        // `create` itself looks for traces.
        let (_, message) = stage.create(spec).err().unwrap_or_else(|| panic!("no failure at {phase}"));
        assert!(message.contains("injected"), "{phase}: {message}");
    }
}

#[test]
fn real_failures_name_their_phase() {
    let stage = stage();
    type Change = fn(&mut sandglass_shim::spec::BoxSpec);
    let cases: [(&str, &str, Change); 6] = [
        ("spec", "impossible id", |spec| spec.id.insert(0, '.')),
        ("rootfs", "/no/such/layer", |spec| spec.root.lowers = vec!["/no/such/layer".into()]),
        ("rootfs", "/no/such/agent", |spec| spec.process.agent = "/no/such/agent".into()),
        ("rootfs", "volume", |spec| {
            spec.root.volumes =
                vec![Bind { source: "/no/such/source".into(), target: "/v".into(), read_only: true }];
        }),
        ("network", "veth", |spec| spec.network.as_mut().unwrap().host_interface = "lo".into()),
        ("spec", "version", |spec| spec.version = 99),
    ];
    for (phase, word, change) in cases {
        let mut spec = stage.spec();
        change(&mut spec);
        let mut clean = spec.clone();
        clean.network = None;
        let dir = stage.prepare(&spec, &MutableFacts::default());
        let mut channel = stage.zygote.create(&dir).unwrap();
        let Some(CreateReport::Failed { phase: found, message }) = read_report(&mut channel).unwrap() else {
            panic!("{phase} did not fail");
        };
        assert!(found == phase && message.contains(word), "{phase}: {found}: {message}");
        assert_eq!(traces(&clean, &dir), NOTHING);
    }
}

#[test]
fn a_taken_interface_name_fails_the_create_and_spares_its_owner() {
    let stage = stage();
    let owner = stage.boxed();
    let mut spec = stage.spec();
    spec.network
        .as_mut()
        .unwrap()
        .host_interface
        .clone_from(&owner.spec.network.as_ref().unwrap().host_interface);
    let dir = stage.prepare(&spec, &MutableFacts::default());
    let mut channel = stage.zygote.create(&dir).unwrap();
    let report = read_report(&mut channel).unwrap().unwrap();
    assert!(matches!(&report, CreateReport::Failed { phase, .. } if phase == "network"), "{report:?}");
    assert_eq!(owner.run("echo alive").0, "alive");
}

#[test]
fn a_killed_shim_takes_the_box_along_and_teardown_removes_the_rest() {
    let stage = stage();
    for paused in [false, true] {
        let boxed = stage.boxed();
        if paused {
            assert!(boxed.ask(Request::Pause).ok);
        }
        assert!(teardown(&boxed.dir).is_err(), "teardown must refuse while the shim runs");
        kill(boxed.state.shim_pid);
        eventually("the lock is free", || !shim_alive(&boxed.dir).unwrap());
        if !paused {
            let init = format!("/proc/{}", boxed.state.init_pid.unwrap());
            eventually("the box dies with its shim", || !Path::new(&init).exists());
        }
        teardown(&boxed.dir).unwrap();
        assert_eq!(traces(&boxed.spec, &boxed.dir), NOTHING);
        let state: sandglass_shim::spec::BoxState =
            serde_json::from_slice(&fs::read(boxed.dir.join("state.json")).unwrap()).unwrap();
        assert_eq!((state.phase, state.exit.unwrap().cause), (Phase::Exited, ExitCause::ShimLost));
        assert!(boxed.dir.join("spec.json").exists());
        teardown(&boxed.dir).unwrap();
    }
}

#[test]
fn a_box_whose_directory_was_removed_is_ended_by_its_id() {
    let stage = stage();
    for paused in [false, true] {
        let boxed = stage.boxed();
        let bystander = stage.boxed();
        if paused {
            assert!(boxed.ask(Request::Pause).ok);
        }
        let aside = stage.home.join(format!("removed-{}", boxed.spec.id));
        fs::rename(&boxed.dir, &aside).unwrap();
        let interface = boxed.spec.network.as_ref().map(|network| network.host_interface.as_str());
        let (id, pid, ticks) = (&boxed.spec.id, boxed.state.shim_pid, boxed.state.shim_start_ticks);
        // Some other process with that number would be left alone.
        end_by_id("sandglass-nobody", None, pid, ticks + 1).unwrap();
        assert!(Path::new(&format!("/proc/{pid}/exe")).exists());
        for _ in 0..2 {
            end_by_id(id, interface, pid, ticks).unwrap();
            assert_eq!(traces(&boxed.spec, &aside), NOTHING);
            eventually("the shim has ended", || !Path::new(&format!("/proc/{pid}/exe")).exists());
        }
        assert_eq!(bystander.run("echo alive").0, "alive");
        fs::remove_dir_all(&aside).unwrap();
    }
    for id in ["", ".", "..", "../sandglass", "a/b"] {
        assert!(end_by_id(id, None, 0, 0).is_err(), "{id:?}");
    }
}

#[test]
fn a_shim_killed_at_any_moment_of_a_create_leaves_nothing_after_teardown() {
    let stage = stage();
    let without = [0, 300, 700, 1100, 1600, 2200, 3000, 4000, 6000].map(|delay| (delay, None));
    let with = (0..40).map(|step| (step * 700, Some(crate::egress::ready())));
    for (delay_us, egress) in without.into_iter().chain(with) {
        let spec = BoxSpec { egress, ..stage.spec() };
        let dir = stage.prepare(&spec, &MutableFacts::default());
        let (channel, mut child) = sandglass_shim::create::run(Path::new(SHIM), &dir).unwrap();
        // Executing takes a few milliseconds itself; the lock shows when the create proper begins.
        eventually("the shim has begun", || dir.join("shim.lock").exists());
        std::thread::sleep(Duration::from_micros(delay_us));
        child.kill().unwrap();
        child.wait().unwrap();
        drop(channel);
        teardown(&dir).unwrap();
        assert_eq!(traces(&spec, &dir), NOTHING, "killed after {delay_us} us");
        sandglass_shim::remove_dir(&dir).unwrap();
    }
}

#[test]
fn pause_and_resume_stop_and_continue_everything() {
    let stage = stage();
    let boxed = stage.boxed();
    let mut client = boxed.client();
    assert!(client.request(&Request::Pause).unwrap().state.unwrap().paused);
    assert!(client.request(&Request::Pause).unwrap().ok, "pausing twice is fine");
    let address = boxed.address();
    let (asked, waiting) = std::sync::mpsc::channel();
    let probe = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let mut stream = std::net::TcpStream::connect((address, crate::stage::PORT)).unwrap();
        stream.write_all(b"echo hello\n").unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let early = stream.read(&mut [0; 64]).is_ok();
        asked.send(()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut late = String::new();
        stream.read_to_string(&mut late).unwrap();
        (early, late)
    });
    waiting.recv().unwrap();
    assert!(!client.request(&Request::Resume).unwrap().state.unwrap().paused);
    let (early, late) = probe.join().unwrap();
    assert!(!early && late.starts_with("hello"), "{early} {late}");
    assert_eq!(boxed.event_kinds(), ["created", "started", "paused", "resumed"]);
    assert!(client.request(&Request::Pause).unwrap().ok);
    assert!(boxed.remove().ok, "a paused box can be removed");
    assert_eq!(traces(&boxed.spec, &boxed.dir), NOTHING);
}

#[test]
fn removal_gives_the_agent_its_grace() {
    let stage = stage();
    let mark = stage.home.join("mark");
    fs::create_dir(&mark).unwrap();
    let boxed = stage.boxed_with(|spec| {
        let script = "trap 'echo bye > /mark/bye; exit 5' TERM; : > /mark/set; while :; do sleep 0.01; done";
        spec.process.entrypoint = vec!["/bin/sh".into(), "-c".into(), script.into()];
        spec.root.volumes = vec![Bind { source: mark.clone(), target: "/mark".into(), read_only: false }];
    });
    eventually("the trap is set", || mark.join("set").exists());
    let begun = Instant::now();
    assert!(boxed.ask(Request::Remove { grace_ms: 120_000 }).ok);
    assert!(begun.elapsed() < Duration::from_secs(60), "it stopped by itself, so nobody should have waited");
    assert_eq!(fs::read_to_string(mark.join("bye")).unwrap(), "bye\n");
    // Root of the box is root on a volume, by the id mapping.
    assert_eq!(fs::metadata(mark.join("bye")).unwrap().uid(), 0);

    let stubborn = stage.boxed_with(|spec| {
        let script = "trap '' TERM; : > /mark/ignored; while :; do sleep 1; done";
        spec.process.entrypoint = vec!["/bin/sh".into(), "-c".into(), script.into()];
        spec.root.volumes = vec![Bind { source: mark.clone(), target: "/mark".into(), read_only: false }];
    });
    eventually("the signal is ignored", || mark.join("ignored").exists());
    let begun = Instant::now();
    assert!(stubborn.ask(Request::Remove { grace_ms: 200 }).ok);
    assert!(begun.elapsed() >= Duration::from_millis(200));
    assert_eq!(traces(&stubborn.spec, &stubborn.dir), NOTHING);
}

#[test]
fn the_backstop_removes_a_box_that_nobody_removed() {
    let stage = stage();
    // Long enough for three creates and a subscription on a busy machine.
    let facts = MutableFacts { expires_at_ms: Some(now_ms() + 8_000), ..MutableFacts::default() };
    let boxed = stage.create_with(stage.spec(), &facts).unwrap_or_else(|error| panic!("{error:?}"));
    let renewed = stage.create_with(stage.spec(), &facts).unwrap_or_else(|error| panic!("{error:?}"));
    let unheard = stage.create_with(stage.spec(), &facts).unwrap_or_else(|error| panic!("{error:?}"));
    let mut subscriber = boxed.client();
    assert!(subscriber.request(&Request::Subscribe).unwrap().ok);
    let later =
        MutableFacts { expires_at_ms: Some(now_ms() + 60_000), revision: 1, ..MutableFacts::default() };
    write_facts(&renewed.dir, &later);
    assert!(renewed.ask(Request::FactsChanged).ok);
    // Here the server died between writing and telling: the shim looks again before it acts.
    write_facts(&unheard.dir, &later);
    let mut kinds = Vec::new();
    while let Some(notice) = subscriber.next_notice().unwrap() {
        kinds.push(notice.event.kind);
    }
    assert_eq!(kinds, ["expired", "exited", "removed"]);
    assert!(!boxed.dir.exists());
    assert_eq!(traces(&boxed.spec, &boxed.dir), NOTHING);
    assert_eq!(renewed.run("echo alive").0, "alive");
    assert_eq!(unheard.run("echo alive").0, "alive");
}

#[test]
fn too_many_clients_are_refused_and_a_subscriber_stays() {
    let stage = stage();
    let boxed = stage.boxed();
    let mut subscriber = boxed.client();
    assert!(subscriber.request(&Request::Subscribe).unwrap().ok);
    let mut others = Vec::new();
    for _ in 1..64 {
        let mut client = boxed.client();
        assert!(client.request(&Request::State).unwrap().ok);
        others.push(client);
    }
    for _ in 0..100 {
        // Refused in words, or already closed by the time of the question.
        if let Ok(answer) = boxed.client().request(&Request::State) {
            assert!(!answer.ok && answer.message.unwrap().contains("too many clients"));
        }
    }
    assert!(others[62].request(&Request::Pause).unwrap().ok);
    assert_eq!(subscriber.next_notice().unwrap().unwrap().event.kind, "paused");
    assert!(others[0].request(&Request::Resume).unwrap().ok);
    drop(others);
    assert!(boxed.ask(Request::State).ok, "there is room again");
    assert_eq!(subscriber.next_notice().unwrap().unwrap().event.kind, "resumed");
}

#[test]
fn subscribers_hear_everything_and_a_deaf_one_is_cut_off() {
    let stage = stage();
    let boxed = stage.boxed();
    let mut subscriber = boxed.client();
    assert_eq!(subscriber.request(&Request::Subscribe).unwrap().state.unwrap().phase, Phase::Running);
    let mut deaf = boxed.client();
    deaf.request(&Request::Subscribe).unwrap();
    let mut client = boxed.client();
    for _ in 0..3 {
        client.request(&Request::Pause).unwrap();
        assert_eq!(subscriber.next_notice().unwrap().unwrap().event.kind, "paused");
        client.request(&Request::Resume).unwrap();
        let notice = subscriber.next_notice().unwrap().unwrap();
        assert!(notice.event.kind == "resumed" && !notice.state.paused);
    }
    boxed.remove();
    assert_eq!(subscriber.next_notice().unwrap().unwrap().event.kind, "exited");
    assert_eq!(subscriber.next_notice().unwrap().unwrap().event.kind, "removed");
    assert_eq!(subscriber.next_notice().unwrap(), None);
}

#[test]
fn nonsense_on_the_socket_hurts_only_its_sender() {
    use std::io::{Read, Write};
    let stage = stage();
    let boxed = stage.boxed();
    for bytes in [&b"\xff\xff\xff\xff"[..], b"\0\0\0\x02{}", b"\0\0\0\x05hello", b"\0\0"] {
        let mut stream = sandglass_shim::client::connect(&boxed.dir).unwrap();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
    let crowd: Vec<_> = (0..100).map(|_| sandglass_shim::client::connect(&boxed.dir).unwrap()).collect();
    drop(crowd);
    assert!(boxed.ask(Request::State).ok);
}

#[test]
fn twenty_boxes_at_once() {
    let stage = stage();
    let begun = Instant::now();
    let boxes: Vec<TestBox> = std::thread::scope(|scope| {
        let started: Vec<_> = (0..20).map(|_| scope.spawn(|| stage.boxed())).collect();
        started.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    println!("20 parallel creates: {:?}", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(60));
    for boxed in &boxes {
        assert_eq!(boxed.run("hostname").0, boxed.spec.hostname);
    }
    std::thread::scope(|scope| {
        for boxed in &boxes {
            scope.spawn(|| assert!(boxed.remove().ok));
        }
    });
    for boxed in &boxes {
        assert_eq!(traces(&boxed.spec, &boxed.dir), NOTHING);
    }
}

#[test]
fn boxes_outlive_the_server() {
    let stage = stage();
    let zygote = Zygote::spawn(Path::new(SHIM)).unwrap();
    let pid = zygote.pid();
    let spec = stage.spec();
    let dir = stage.prepare(&spec, &MutableFacts::default());
    let mut channel = zygote.create(&dir).unwrap();
    let Some(CreateReport::Created { state, timings }) = read_report(&mut channel).unwrap() else {
        panic!("not created");
    };
    let boxed = TestBox { dir, spec, state, timings };
    drop(zygote);
    eventually("the zygote has ended", || !Path::new(&format!("/proc/{pid}/exe")).exists());
    assert!(shim_alive(&boxed.dir).unwrap());
    assert_eq!(boxed.run("echo alive").0, "alive");
    let mut client = Client::connect(&boxed.dir, Duration::from_secs(60)).unwrap();
    assert_eq!(client.request(&Request::State).unwrap().state.unwrap().phase, Phase::Running);
}

#[test]
fn a_second_shim_for_the_same_directory_is_refused() {
    let stage = stage();
    let boxed = stage.boxed();
    let mut channel = stage.zygote.create(&boxed.dir).unwrap();
    let report = read_report(&mut channel).unwrap().unwrap();
    assert!(matches!(report, CreateReport::Failed { phase, .. } if phase == "exists"));
    assert_eq!(boxed.run("echo alive").0, "alive");
}

#[test]
fn shims_are_small_and_hold_nothing_of_the_server_s() {
    let stage = stage();
    let boxed = stage.boxed();
    let pid = boxed.state.shim_pid;
    for target in ["0", "1", "2"] {
        assert_eq!(fs::read_link(format!("/proc/{pid}/fd/{target}")).unwrap(), Path::new("/dev/null"));
    }
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let field = |name: &str| {
        let line = rollup.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    println!("shim: rss {} KiB, pss {} KiB (test build, not static)", field("Rss:"), field("Pss:"));
    assert!(field("Pss:") < 3000);
    let fds = boxed.run("ls -l /proc/1/fd").0;
    assert!(!fds.contains(&*stage.home.to_string_lossy()), "{fds}");
}

#[test]
fn grafts_and_volumes_show_up_with_the_box_s_ids() {
    let stage = stage();
    let shared = stage.home.join("shared");
    fs::create_dir_all(shared.join("sub")).unwrap();
    fs::write(shared.join("note"), "from the host").unwrap();
    let file = stage.home.join("single");
    fs::write(&file, "one file").unwrap();
    let boxed = stage.boxed_with(|spec| {
        spec.root.grafts = vec![
            Graft { lower: stage.image.join("usr"), target: "/opt".into() },
            Graft { lower: stage.image.join("etc"), target: "/etc".into() },
        ];
        spec.root.read_only = true;
        spec.root.volumes = vec![
            Bind { source: shared.clone(), target: "/deep/er/shared".into(), read_only: false },
            Bind { source: shared.clone(), target: "/ro".into(), read_only: true },
            Bind { source: file.clone(), target: "/single.txt".into(), read_only: true },
        ];
    });
    assert_eq!(boxed.run("cat /deep/er/shared/note /single.txt").0, "from the hostone file");
    assert_eq!(boxed.run("stat -c %u /deep/er/shared/note /opt/bin /etc/passwd").0, "0\n0\n0");
    assert_eq!(boxed.run("echo x > /deep/er/shared/new && echo done").0, "done");
    assert_ne!(boxed.run("echo x > /ro/new").1, 0);
    assert_ne!(boxed.run("echo x > /file").1, 0, "the root is read-only");
    // A graft has an upper of its own, and never writes to what lies below.
    assert_eq!(
        boxed.run("echo x > /opt/written; cat /etc/hostname /opt/written").0,
        format!("{}\nx", boxed.spec.hostname)
    );
    assert!(!stage.image.join("usr/written").exists());
}

#[test]
fn a_hundred_layers_fit() {
    let stage = stage();
    let mut lowers = Vec::new();
    for number in 0..100 {
        let layer =
            stage.home.join(format!("layer-with-a-rather-long-name-so-that-a-page-overflows-{number}"));
        fs::create_dir_all(&layer).unwrap();
        fs::write(layer.join(format!("f{number}")), "").unwrap();
        lowers.push(layer);
    }
    lowers.push(stage.image.clone());
    let mut spec = stage.spec();
    spec.root.lowers = lowers;
    match stage.create(spec) {
        Ok(boxed) => {
            println!("timings: {:?}", boxed.timings);
            assert_eq!(boxed.run("ls / | grep -c '^f'").0, "100");
        }
        Err((phase, message)) if message.contains("flatten") => skip(&format!("{phase}: {message}")),
        Err((phase, message)) => panic!("{phase}: {message}"),
    }
}

#[test]
fn an_empty_image_is_enough_for_the_agent() {
    let stage = stage();
    let empty = stage.home.join("empty");
    fs::create_dir_all(&empty).unwrap();
    let boxed = stage.boxed_with(|spec| spec.root.lowers = vec![empty.clone()]);
    // There is no shell in it; that the agent answers at all is the point.
    assert_eq!(boxed.run("anything").1, 127);
    let upper = boxed.dir.join("upper");
    assert!(upper.join("etc/resolv.conf").exists() && upper.join("opt/opensandbox/execd").exists());
}
