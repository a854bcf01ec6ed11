//! What every case needs: a root file system, the stand-in agent, a zygote, a network, boxes that clean up.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use sandglass_shim::Zygote;
use sandglass_shim::client::{Client, read_report};
use sandglass_shim::host_network::{self, Subnet};
use sandglass_shim::protocol::{CreateReport, Request, Response};
use sandglass_shim::spec::{
    BoxSpec, BoxState, IdRange, Limits, MutableFacts, NetworkSpec, Phase, ProcessSpec, RootSpec,
};

pub const SHIM: &str = env!("CARGO_BIN_EXE_sandglass-shim");
pub const PORT: u16 = 44772;
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
pub const IDS: IdRange = IdRange { base: 700_000_000, count: 65_536 };

/// Shared by all cases that run at the same time; the last one takes it down.
pub struct Stage {
    pub home: PathBuf,
    pub image: PathBuf,
    pub agent: PathBuf,
    pub zygote: Zygote,
    pub subnet: Subnet,
    pub prefix: String,
}

static CURRENT: Mutex<Weak<Stage>> = Mutex::new(Weak::new());
static NUMBER: AtomicU32 = AtomicU32::new(2);
/// How often it was set up: while one is taken down, another may be set up already.
static SET_UP: AtomicU32 = AtomicU32::new(0);

pub fn stage() -> Arc<Stage> {
    let mut current = CURRENT.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(stage) = current.upgrade() {
        return stage;
    }
    let stage = Arc::new(Stage::set_up());
    *current = Arc::downgrade(&stage);
    stage
}

impl Stage {
    fn set_up() -> Self {
        assert!(
            rustix::process::geteuid().is_root(),
            "these tests need root: they make namespaces and mounts"
        );
        let time = SET_UP.fetch_add(1, Ordering::Relaxed);
        let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("shim-{}-{time}", std::process::id()));
        let _ = fs::remove_dir_all(&home);
        fs::create_dir_all(home.join("sandboxes")).unwrap();
        fs::set_permissions(&home, fs::Permissions::from_mode(0o700)).unwrap();
        let image = home.join("image");
        lay_out_busybox(&image);
        let prefix = format!("sgt{:04x}{:02x}", std::process::id() & 0xffff, time & 0xff);
        let candidates: Vec<Subnet> = (213..240)
            .map(|third| Subnet { address: Ipv4Addr::new(10, 213, third, 0), prefix_len: 24 })
            .collect();
        let subnet = host_network::pick_free_subnet(&candidates).unwrap().expect("a free subnet");
        host_network::ensure(&prefix, subnet).unwrap();
        let binary = std::env::var_os("SANDGLASS_SHIM_BINARY").map_or_else(|| SHIM.into(), PathBuf::from);
        let zygote = Zygote::spawn(&binary).unwrap();
        Self { home, image, agent: agent().to_owned(), zygote, subnet, prefix }
    }

    pub fn spec(&self) -> BoxSpec {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let octets = self.subnet.address.octets();
        let address = Ipv4Addr::new(octets[0], octets[1], octets[2], (number % 250 + 2) as u8);
        BoxSpec {
            version: 1,
            // Of one length: traces are found by it, and none is the beginning of another.
            id: format!("{}-{number:05}", self.prefix),
            generation: 1,
            created_at_ms: 0,
            hostname: format!("box{number}"),
            root: RootSpec { lowers: vec![self.image.clone()], ..RootSpec::default() },
            network: Some(NetworkSpec {
                address,
                gateway: GATEWAY,
                host_interface: format!("{}x{number:x}", self.prefix),
                mtu: 1500,
                dns: vec!["192.0.2.53".parse().unwrap()],
                search: vec!["example.test".into()],
            }),
            egress: None,
            ids: IDS,
            limits: Limits::default(),
            process: ProcessSpec {
                agent: self.agent.clone(),
                entrypoint: vec![],
                env: vec![
                    ("PATH".into(), "/bin:/sbin".into()),
                    ("HOME".into(), "/root".into()),
                    ("OPENSANDBOX_ID".into(), format!("{}-{number:05}", self.prefix)),
                ],
                cwd: "/".into(),
                user: String::new(),
                agent_port: PORT,
                isolation: false,
                lifecycle: serde_json::Value::Null,
                standby: false,
            },
            access_token: "secret-token".into(),
            route_token: "route-token".into(),
            expiry_grace_ms: 0,
            about: serde_json::json!({}),
        }
    }

    pub fn prepare(&self, spec: &BoxSpec, facts: &MutableFacts) -> PathBuf {
        let dir = self.home.join("sandboxes").join(&spec.id);
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("spec.json"), serde_json::to_vec(spec).unwrap()).unwrap();
        write_facts(&dir, facts);
        dir
    }

    pub fn create(&self, spec: BoxSpec) -> Result<TestBox, (String, String)> {
        self.create_with(spec, &MutableFacts::default())
    }

    pub fn create_with(&self, spec: BoxSpec, facts: &MutableFacts) -> Result<TestBox, (String, String)> {
        let dir = self.prepare(&spec, facts);
        let mut channel = self.zygote.create(&dir).unwrap();
        channel.set_read_timeout(Some(Duration::from_secs(40))).unwrap();
        match read_report(&mut channel).unwrap() {
            Some(CreateReport::Created { state, timings }) => Ok(TestBox { dir, spec, state, timings }),
            Some(CreateReport::Failed { phase, message }) => {
                assert_eq!(traces(&spec, &dir), Vec::<String>::new(), "a failed create left something");
                Err((phase, message))
            }
            None => Err(("shim".into(), "died without a report".into())),
        }
    }

    pub fn boxed(&self) -> TestBox {
        self.create(self.spec()).unwrap_or_else(|(phase, message)| panic!("{phase}: {message}"))
    }

    pub fn boxed_with(&self, change: impl FnOnce(&mut BoxSpec)) -> TestBox {
        let mut spec = self.spec();
        change(&mut spec);
        self.create(spec).unwrap_or_else(|(phase, message)| panic!("{phase}: {message}"))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = host_network::remove(&self.prefix);
        let _ = fs::remove_dir_all(&self.home);
    }
}

pub fn write_facts(dir: &Path, facts: &MutableFacts) {
    fs::write(dir.join("facts.new"), serde_json::to_vec(facts).unwrap()).unwrap();
    fs::rename(dir.join("facts.new"), dir.join("facts.json")).unwrap();
}

/// A running box; removed when dropped.
pub struct TestBox {
    pub dir: PathBuf,
    pub spec: BoxSpec,
    pub state: BoxState,
    pub timings: BTreeMap<String, u64>,
}

impl TestBox {
    pub fn address(&self) -> Ipv4Addr {
        self.spec.network.as_ref().expect("a box with a network").address
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.dir, Duration::from_secs(60)).unwrap()
    }

    pub fn ask(&self, request: Request) -> Response {
        self.client().request(&request).unwrap()
    }

    pub fn current(&self) -> BoxState {
        self.ask(Request::State).state.unwrap()
    }

    /// Runs a shell command inside; output of both kinds and the exit code.
    pub fn run(&self, command: &str) -> (String, i32) {
        self.try_run(command).unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    pub fn try_run(&self, command: &str) -> std::io::Result<(String, i32)> {
        let address = SocketAddr::from((self.address(), PORT));
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(20))?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        stream.write_all(format!("{command}\n").as_bytes())?;
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let (output, code) = text.rsplit_once("\n#exit ").unwrap_or((&text, "-1"));
        Ok((output.trim().to_owned(), code.trim().parse().unwrap_or(-1)))
    }

    pub fn wait_exited(&self) -> BoxState {
        let mut state = self.current();
        eventually("the box has exited", || {
            state = self.current();
            state.phase == Phase::Exited
        });
        state
    }

    pub fn events(&self) -> Vec<serde_json::Value> {
        let text = fs::read_to_string(self.dir.join("events.jsonl")).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub fn event_kinds(&self) -> Vec<String> {
        self.events().iter().map(|event| event["kind"].as_str().unwrap().to_owned()).collect()
    }

    pub fn remove(&self) -> Response {
        self.ask(Request::Remove { grace_ms: 0 })
    }
}

impl Drop for TestBox {
    fn drop(&mut self) {
        if let Ok(mut client) = Client::connect(&self.dir, Duration::from_secs(15)) {
            let _ = client.request(&Request::Remove { grace_ms: 0 });
        }
        let _ = sandglass_shim::teardown(&self.dir);
        let _ = sandglass_shim::remove_dir(&self.dir);
    }
}

/// Whatever of a box can still be found on this machine, apart from its directory.
pub fn traces(spec: &BoxSpec, dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let dir = dir.to_string_lossy();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let path = process.path();
        if !process.file_name().to_string_lossy().bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        let read = |name: &str| fs::read_to_string(path.join(name)).unwrap_or_default();
        if read("cgroup").contains(&spec.id) {
            found.push(format!("process {} in its control group: {}", path.display(), read("comm").trim()));
        }
        if read("mountinfo").contains(&*dir) {
            found.push(format!("mounts seen by {} ({})", path.display(), read("comm").trim()));
        }
    }
    let hierarchies = fs::read_dir("/sys/fs/cgroup").unwrap().flatten().map(|entry| entry.path());
    for hierarchy in hierarchies.chain(["/sys/fs/cgroup".into()]) {
        for id in [spec.id.clone(), format!("{}.egress", spec.id)] {
            let group = hierarchy.join("sandglass").join(id);
            if group.exists() {
                found.push(format!("control group {}", group.display()));
            }
        }
    }
    if let Some(network) = &spec.network {
        if Path::new("/sys/class/net").join(&network.host_interface).exists() {
            found.push(format!("interface {}", network.host_interface));
        }
        let hex = format!("{:08X}", u32::from_le_bytes(network.address.octets()));
        if fs::read_to_string("/proc/net/route").unwrap().contains(&hex) {
            found.push(format!("route to {}", network.address));
        }
    }
    found
}

pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Says loudly that a case did not run.
pub fn skip(why: &str) {
    eprintln!("SKIPPED: {why}");
}

/// The stand-in agent.
pub fn agent() -> &'static Path {
    static AGENT: OnceLock<PathBuf> = OnceLock::new();
    AGENT.get_or_init(|| compiled("agent"))
}

/// The stand-in for the egress enforcer.
pub fn enforcer() -> &'static Path {
    static ENFORCER: OnceLock<PathBuf> = OnceLock::new();
    ENFORCER.get_or_init(|| compiled("egress"))
}

/// A static program, compiled once for each change of its source.
fn compiled(name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/stub/{name}.c"));
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("stub-{name}"));
    let newer =
        |a: &Path, b: &Path| Some(a.metadata().ok()?.modified().ok()? > b.metadata().ok()?.modified().ok()?);
    if newer(&out, &source) != Some(true) {
        let aside = out.with_extension(std::process::id().to_string());
        let status = Command::new("gcc")
            .args(["-static", "-O1", "-o"])
            .args([&aside, &source])
            .status()
            .expect("gcc is needed for the stand-ins: install the package `gcc`");
        assert!(status.success(), "the stand-in {name} does not compile");
        fs::rename(&aside, &out).unwrap();
    }
    out
}

/// A small system of nothing but busybox.
pub fn lay_out_busybox(root: &Path) {
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].iter().find(|path| Path::new(path).exists());
    let busybox =
        busybox.expect("busybox is needed as the boxes' system: install the package `busybox-static`");
    for dir in ["bin", "etc", "proc", "sys", "dev", "root", "usr/bin"] {
        fs::create_dir_all(root.join(dir)).unwrap();
    }
    fs::create_dir(root.join("tmp")).unwrap();
    fs::set_permissions(root.join("tmp"), fs::Permissions::from_mode(0o1777)).unwrap();
    fs::copy(busybox, root.join("bin/busybox")).unwrap();
    let listed = Command::new(busybox).arg("--list").output().unwrap().stdout;
    for name in String::from_utf8_lossy(&listed).lines().filter(|name| *name != "busybox") {
        symlink("busybox", root.join("bin").join(name)).unwrap();
    }
    fs::write(root.join("etc/passwd"), "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n")
        .unwrap();
    // Programs that take root by their mode bits must stay what they are.
    fs::copy(agent(), root.join("usr/bin/suid")).unwrap();
    fs::set_permissions(root.join("usr/bin/suid"), fs::Permissions::from_mode(0o4755)).unwrap();
}

/// A network namespace that plays the rest of the world, with a web server on port 9000.
pub struct Outside {
    pub name: String,
    /// The host's end of the way there.
    pub near: String,
    server: Option<Child>,
}

impl Outside {
    /// The host's address, of the `block` of four that starts there.
    pub fn here(block: u8) -> Ipv4Addr {
        Ipv4Addr::new(198, 51, 100, block + 1)
    }

    pub fn there(block: u8) -> Ipv4Addr {
        Ipv4Addr::new(198, 51, 100, block + 2)
    }

    pub fn set_up(kind: &str, block: u8, world: &Path) -> Self {
        let name = format!("sgt{kind}{}", std::process::id());
        let near = format!("{kind}{}", std::process::id());
        let ip = |line: &str| {
            let status = Command::new("ip").args(line.split(' ')).status().unwrap();
            assert!(status.success(), "ip {line}");
        };
        let mut outside = Self { name: name.clone(), near: near.clone(), server: None };
        ip(&format!("netns add {name}"));
        ip(&format!("link add {near} type veth peer name far netns {name}"));
        ip(&format!("addr add {}/30 dev {near}", Self::here(block)));
        ip(&format!("link set {near} up"));
        ip(&format!("-n {name} addr add {}/30 dev far", Self::there(block)));
        ip(&format!("-n {name} link set far up"));
        ip(&format!("-n {name} link set lo up"));
        let server = Command::new("ip")
            .args(["netns", "exec", &name, "busybox", "httpd", "-f", "-p", "9000", "-h"])
            .arg(world)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        outside.server = Some(server);
        outside
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        if let Some(server) = &mut self.server {
            let _ = server.kill();
            let _ = server.wait();
        }
        let _ = Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}
