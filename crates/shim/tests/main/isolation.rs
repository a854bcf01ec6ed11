//! Trying to cross the border from inside: every case against our box and, where comparable, against `runc`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use sandglass_shim::spec::{Bind, BoxSpec};

use crate::runc::Runc;
use crate::stage::{IDS, agent, skip, stage};

/// What the attempt must come to.
#[derive(Clone, Copy)]
enum Must {
    /// The probe says "denied".
    BeDenied,
    /// The shell command fails.
    Fail,
    Print(&'static str),
}

/// How `runc` compares.
#[derive(Clone, Copy, PartialEq)]
enum Other {
    Same,
    /// The generated bundle cannot forbid it: runc ships no seccomp profile.
    NeedsSeccomp,
    /// Differs by what we add.
    OursOnly,
}

const CASES: &[(&str, &str, Must, Other)] = &[
    ("mounting", "P mount", Must::BeDenied, Other::Same),
    ("unmounting a mask", "P umount /proc/keys", Must::BeDenied, Other::Same),
    ("remounting /proc/sys writable", "P remount /proc/sys", Must::BeDenied, Other::Same),
    ("remounting the agent writable", "P remount /opt/opensandbox/execd", Must::BeDenied, Other::Same),
    ("the new mount calls: fsopen", "P fsopen", Must::BeDenied, Other::Same),
    ("the new mount calls: open_tree", "P open_tree", Must::BeDenied, Other::Same),
    ("pivot_root", "P pivot_root", Must::BeDenied, Other::Same),
    ("a user namespace by unshare", "P unshare-user", Must::BeDenied, Other::NeedsSeccomp),
    ("a user namespace by clone", "P clone-user", Must::BeDenied, Other::NeedsSeccomp),
    ("a network namespace", "P unshare-net", Must::BeDenied, Other::Same),
    (
        "clone3, whose flags no filter can see",
        "P clone3",
        Must::Print("clone3: denied: ENOSYS"),
        Other::NeedsSeccomp,
    ),
    ("joining a namespace", "P setns", Must::BeDenied, Other::Same),
    ("bpf", "P bpf", Must::BeDenied, Other::NeedsSeccomp),
    ("reading the session keyring", "P keyctl", Must::BeDenied, Other::NeedsSeccomp),
    ("adding a key", "P add_key", Must::BeDenied, Other::NeedsSeccomp),
    ("io_uring", "P io_uring", Must::BeDenied, Other::NeedsSeccomp),
    ("userfaultfd", "P userfaultfd", Must::BeDenied, Other::NeedsSeccomp),
    ("perf events", "P perf", Must::BeDenied, Other::NeedsSeccomp),
    ("open_by_handle_at", "P open_by_handle", Must::BeDenied, Other::Same),
    ("loading a module", "P init_module", Must::BeDenied, Other::Same),
    ("kexec", "P kexec", Must::BeDenied, Other::Same),
    ("reboot", "P reboot", Must::BeDenied, Other::Same),
    ("setting the clock", "P settime", Must::BeDenied, Other::Same),
    ("the kernel log", "P syslog", Must::BeDenied, Other::Same),
    ("changing the host name", "P sethostname evil", Must::BeDenied, Other::Same),
    ("a vsock to the hypervisor", "P vsock", Must::BeDenied, Other::NeedsSeccomp),
    ("reading every packet", "P packet", Must::BeDenied, Other::NeedsSeccomp),
    ("reading every packet, cooked", "P packet-cooked", Must::BeDenied, Other::NeedsSeccomp),
    ("reading every packet by the old name", "P packet-old", Must::BeDenied, Other::NeedsSeccomp),
    ("reading every packet past the filter's width", "P packet-high", Must::BeDenied, Other::NeedsSeccomp),
    ("reading every packet by AF_XDP", "P xdp", Must::BeDenied, Other::NeedsSeccomp),
    ("reading the agent's connections", "P raw-tcp", Must::BeDenied, Other::NeedsSeccomp),
    ("sending packets of any protocol", "P raw-any", Must::BeDenied, Other::NeedsSeccomp),
    ("writing the headers of packets", "P raw-header", Must::BeDenied, Other::NeedsSeccomp),
    ("writing the headers of IPv6 packets", "P raw-header-6", Must::BeDenied, Other::NeedsSeccomp),
    ("sending from any address", "P any-source", Must::BeDenied, Other::NeedsSeccomp),
    (
        "connections over several ways at once",
        "P mptcp",
        Must::Print("mptcp: denied: EPROTONOSUPPORT"),
        Other::NeedsSeccomp,
    ),
    ("limiting init", "P prlimit-init", Must::BeDenied, Other::NeedsSeccomp),
    ("the x32 calls", "P x32", Must::BeDenied, Other::Same),
    ("the 32-bit calls", "P i386", Must::Fail, Other::NeedsSeccomp),
    ("a call of the future", "P unknown-call", Must::Print("unknown-call: denied: ENOSYS"), Other::Same),
    ("making a disk node", "P mknod", Must::BeDenied, Other::Same),
    ("making even a null node", "P mknod-null", Must::BeDenied, Other::Same),
    ("signalling a host process", "P kill HOSTPID", Must::BeDenied, Other::Same),
    ("tracing a host process", "P ptrace HOSTPID", Must::BeDenied, Other::Same),
    ("seeing a host process", "test -e /proc/HOSTPID", Must::Fail, Other::Same),
    ("seeing host files", "test -e HOME/sandboxes -o -e HOME/image", Must::Fail, Other::Same),
    ("host files through init's root", "ls /proc/1/root/HOME", Must::Fail, Other::Same),
    ("host shared memory", "P shm-find", Must::BeDenied, Other::Same),
    (
        "privileges by the mode bits of a file",
        "su user -c '/usr/bin/suid probe euid'",
        Must::Print("1000"),
        Other::Same,
    ),
    ("no_new_privs is set", "P no_new_privs", Must::Print("1"), Other::Same),
    ("writing kernel settings", "echo 1 > /proc/sys/kernel/panic", Must::Fail, Other::Same),
    (
        "a core pattern that runs on the host",
        "echo '|/x' > /proc/sys/kernel/core_pattern",
        Must::Fail,
        Other::Same,
    ),
    (
        "network settings of its own namespace",
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        Must::Fail,
        Other::Same,
    ),
    ("sysrq", "echo h > /proc/sysrq-trigger", Must::Fail, Other::Same),
    ("an uevent helper", "echo /x > /sys/kernel/uevent_helper", Must::Fail, Other::Same),
    ("kernel memory", "test -n \"$(head -c 1 /proc/kcore)\"", Must::Fail, Other::Same),
    ("kernel keys", "test -n \"$(cat /proc/keys)\"", Must::Fail, Other::Same),
    ("timers of all processes", "test -n \"$(cat /proc/timer_list)\"", Must::Fail, Other::Same),
    ("firmware", "ls -A /sys/firmware | grep .", Must::Fail, Other::Same),
    ("the host's memory and log devices", "cat /dev/mem /dev/kmsg /dev/port", Must::Fail, Other::Same),
    ("the host's disks", "ls /dev/vda /dev/sda /dev/nvme0n1 /dev/loop0", Must::Fail, Other::Same),
    (
        "more devices than needed",
        "ls /dev | tr '\\n' ' '",
        Must::Print("fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero"),
        Other::OursOnly,
    ),
    (
        "writing to /sys",
        "mkdir /sys/kernel/x || find /sys -type f -writable 2>/dev/null | xargs -n1 touch",
        Must::Fail,
        Other::Same,
    ),
    (
        "making a control group",
        "cd /sys/fs/cgroup; test -d memory && cd memory; mkdir x",
        Must::Fail,
        Other::Same,
    ),
    ("leaving the control group", "echo 0 > /sys/fs/cgroup/memory/tasks", Must::Fail, Other::Same),
    (
        "lifting the memory limit",
        "echo -1 > /sys/fs/cgroup/memory/memory.limit_in_bytes",
        Must::Fail,
        Other::Same,
    ),
    (
        "the control group's name",
        "cut -d: -f3 /proc/self/cgroup | grep -v '^/process_api' | sort -u | tr '\\n' ' '",
        Must::Print("/"),
        Other::OursOnly,
    ),
    ("secrets in init's environment", "grep -c secret /proc/1/environ", Must::Print("0"), Other::OursOnly),
    (
        "capabilities beyond the list",
        "grep CapEff /proc/self/status | tail -c 9",
        Must::Print("a80425fb"),
        Other::Same,
    ),
    ("the bounding set", "grep CapBnd /proc/self/status | tail -c 9", Must::Print("a80425fb"), Other::Same),
    ("changing the agent", "echo x > /opt/opensandbox/execd", Must::Fail, Other::OursOnly),
    ("leaked descriptors", "ls /proc/self/fd | tr '\\n' ' '", Must::Print("0 1 2 3"), Other::OursOnly),
];

fn judge(must: Must, (out, code): &(String, i32)) -> bool {
    match must {
        Must::BeDenied => out.contains("denied") && !out.contains("allowed"),
        Must::Fail => *code != 0,
        Must::Print(text) => out.trim() == text,
    }
}

#[test]
fn the_border_holds() {
    let stage = stage();
    let boxed = stage.boxed_with(|spec| spec.limits.memory_bytes = Some(256 << 20));
    let mut victim = Command::new("sleep").arg("100").spawn().unwrap();
    assert!(Command::new(agent()).args(["probe", "shm-make"]).status().unwrap().success());
    // Unlike us, runc looks for the image with the rights of the box's root.
    let home = std::env::temp_dir().join(format!("sgt-runc-{}", std::process::id()));
    fs::create_dir_all(&home).unwrap();
    let runc = Runc::start(&home).inspect_err(|why| skip(&format!("comparison with runc: {why}"))).ok();
    let mut wrong = Vec::new();
    for (name, command, must, other) in CASES {
        let command = command
            .replace("P ", "/opt/opensandbox/execd probe ")
            .replace("HOSTPID", &victim.id().to_string())
            .replace("HOME", &stage.home.to_string_lossy());
        let ours = boxed.run(&command);
        let verdict = if judge(*must, &ours) { "holds" } else { "BROKEN" };
        let theirs = match (other, &runc) {
            (Other::NeedsSeccomp, _) => {
                "not compared: needs a seccomp profile, which runc does not ship".to_owned()
            }
            (Other::OursOnly, _) => "not compared: ours by design".to_owned(),
            (Other::Same, None) => "not compared: no runc".to_owned(),
            (Other::Same, Some(runc)) => {
                let result = runc.run(&command);
                if judge(*must, &result) { "holds".into() } else { format!("DIFFERS {result:?}") }
            }
        };
        println!("{name:45} ours: {verdict:7} runc: {theirs}");
        if verdict == "BROKEN" {
            wrong.push(format!("{name}: {ours:?}"));
        }
    }
    victim.kill().unwrap();
    victim.wait().unwrap();
    drop(runc);
    let _ = fs::remove_dir_all(&home);
    let _ = Command::new("ipcrm").args(["-M", "0x5a9d"]).status();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(boxed.run("echo alive").0 == "alive", "the attempts broke the box itself");
}

#[test]
fn the_filter_leaves_what_programs_need() {
    let stage = stage();
    let boxed = stage.boxed();
    for probe in ["raw-icmp", "raw-netlink", "prlimit-ask", "prlimit-self"] {
        let (out, code) = boxed.run(&format!("/opt/opensandbox/execd probe {probe}"));
        assert_eq!((out.as_str(), code), (format!("{probe}: allowed").as_str(), 0));
    }
    assert_eq!(boxed.run("ulimit -n 64; ulimit -n").0, "64");
}

#[test]
fn outside_the_box_s_root_is_nobody() {
    let stage = stage();
    let boxed = stage.boxed();
    let status = fs::read_to_string(format!("/proc/{}/status", boxed.state.init_pid.unwrap())).unwrap();
    let field = |name: &str| status.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    let base = IDS.base.to_string();
    assert_eq!(field("Uid:").split_whitespace().skip(1).collect::<Vec<_>>(), [base.as_str(); 4]);
    assert_eq!(field("Gid:").split_whitespace().skip(1).collect::<Vec<_>>(), [base.as_str(); 4]);
    assert_eq!(field("Groups:").trim(), "Groups:");
    assert_eq!(field("Seccomp:"), "Seccomp:\t2");
    boxed.run("echo x > /made");
    let made = fs::metadata(boxed.dir.join("upper/made")).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&made), IDS.base);
    // Every namespace is its own.
    for namespace in ["user", "mnt", "pid", "uts", "ipc", "net", "cgroup"] {
        let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{namespace}")).unwrap();
        assert_ne!(of("self"), of(&boxed.state.init_pid.unwrap().to_string()), "{namespace}");
    }
}

#[test]
fn a_box_sees_only_itself() {
    let stage = stage();
    let (one, two) = (stage.boxed(), stage.boxed());
    one.run("/opt/opensandbox/execd probe shm-make; echo x > /tmp/mine; echo x > /dev/shm/mine");
    assert!(two.run("/opt/opensandbox/execd probe shm-find").0.contains("denied"));
    assert_ne!(two.run("ls /tmp/mine /dev/shm/mine").1, 0);
    assert!(!stage.image.join("tmp/mine").exists());
}

#[test]
fn links_in_the_image_lead_nowhere() {
    let stage = stage();
    let victim = stage.home.join("victim");
    fs::create_dir_all(&victim).unwrap();
    for name in ["resolv.conf", "hosts", "hostname", "execd"] {
        fs::write(victim.join(name), "untouched").unwrap();
    }
    let up = "../".repeat(20);
    let out = |path: &Path| format!("{up}{}", path.strip_prefix("/").unwrap().display());
    let hostile = |number: u32, make: &dyn Fn(&Path)| {
        let layer = stage.home.join(format!("hostile-{number}"));
        fs::create_dir_all(&layer).unwrap();
        make(&layer);
        move |spec: &mut BoxSpec| spec.root.lowers.insert(0, layer)
    };
    type Change = Box<dyn FnOnce(&mut BoxSpec)>;
    let mut tried = 0;
    let changes: Vec<Change> = vec![
        Box::new(hostile(0, &|layer| {
            fs::create_dir(layer.join("etc")).unwrap();
            for name in ["resolv.conf", "hosts", "hostname"] {
                symlink(out(&victim.join(name)), layer.join("etc").join(name)).unwrap();
            }
        })),
        Box::new(hostile(1, &|layer| symlink(&victim, layer.join("etc")).unwrap())),
        Box::new(hostile(2, &|layer| symlink(out(&victim), layer.join("opt")).unwrap())),
        Box::new(hostile(3, &|layer| {
            fs::create_dir_all(layer.join("opt")).unwrap();
            symlink(&victim, layer.join("opt/opensandbox")).unwrap();
        })),
        Box::new({
            let link = hostile(4, &|layer| symlink(out(&victim), layer.join("data")).unwrap());
            let source = stage.image.join("etc");
            move |spec: &mut BoxSpec| {
                link(spec);
                spec.root.volumes = vec![Bind { source, target: "/data/sub".into(), read_only: true }];
            }
        }),
    ];
    for change in changes {
        let mut spec = stage.spec();
        change(&mut spec);
        let boxed = match stage.create(spec) {
            Ok(boxed) => boxed,
            // A dangling link on the way of a mount point may refuse the create; it must only not be followed out.
            Err((phase, message)) => {
                println!("refused: {phase}: {message}");
                assert_eq!(phase, "rootfs");
                continue;
            }
        };
        tried += 1;
        assert!(boxed.run("cat /etc/resolv.conf").0.contains("192.0.2.53"));
    }
    assert!(tried >= 4);
    let mut names: Vec<_> = fs::read_dir(&victim).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["execd", "hostname", "hosts", "resolv.conf"]);
    for name in names {
        assert_eq!(fs::read_to_string(victim.join(name)).unwrap(), "untouched");
    }
    // A mount point that is a link would put the box's own /proc elsewhere: refused.
    let mut spec = stage.spec();
    hostile(5, &|layer| symlink("/tmp", layer.join("proc")).unwrap())(&mut spec);
    assert_eq!(stage.create(spec).err().unwrap().0, "rootfs");
}

#[test]
fn a_volume_s_source_that_became_a_link_is_refused() {
    let stage = stage();
    let shared = stage.home.canonicalize().unwrap().join("shared");
    fs::create_dir_all(shared.join("sub")).unwrap();
    fs::write(shared.join("sub/file"), "shared").unwrap();
    let with = |source: std::path::PathBuf| {
        let mut spec = stage.spec();
        spec.root.volumes = vec![Bind { source, target: "/data".into(), read_only: true }];
        stage.create(spec)
    };
    assert_eq!(with(shared.join("sub")).unwrap().run("cat /data/file").0, "shared");
    // What a box that shares the volume does between the server's check and the mount.
    fs::rename(shared.join("sub"), shared.join("aside")).unwrap();
    symlink("/", shared.join("sub")).unwrap();
    for source in [shared.join("sub"), shared.join("sub/etc")] {
        let (phase, message) = with(source).err().unwrap();
        assert_eq!(phase, "rootfs");
        assert!(message.contains("volume source changed while it was being mounted"), "{message}");
    }
}

#[test]
fn a_box_for_sessions_mounts_in_namespaces_of_its_own_and_still_makes_no_users() {
    let stage = stage();
    let boxed = stage.boxed_with(|spec| spec.process.isolation = true);
    let (text, code) =
        boxed.run("unshare -m sh -c 'mount -t tmpfs t /tmp && touch /tmp/inside && ls /tmp'; ls /tmp");
    assert_eq!((text.trim(), code), ("inside", 0));
    for denied in ["unshare-user", "clone-user", "bpf", "init_module", "keyctl"] {
        let (text, _) = boxed.run(&format!("/opt/opensandbox/execd probe {denied}"));
        assert!(text.contains("denied"), "{denied}: {text}");
    }
    for locked in ["umount /opt/opensandbox/execd", "mount -o remount,rw,bind /opt/opensandbox/execd"] {
        assert_ne!(boxed.run(locked).1, 0, "{locked}");
    }
    let usual = stage.boxed();
    assert_ne!(usual.run("unshare -m true").1, 0);
}
