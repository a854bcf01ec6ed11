//! Namespaces for a box, its gateway and the world, joined by veth pairs; everything stays inside them.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use ipnet::IpNet;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use sandglass_egress::audit::{Audit, Event};
use sandglass_egress::firewall::{Firewall, NameGate, Placement, Plan, Ports};
use sandglass_egress::inspect::Inspector;
use sandglass_egress::policy::{Action, Rules, Verdict};

pub const BOXED: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);
pub const OWN: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 3);
pub const MARK: u32 = 1;
/// Addresses of the world, all of the same servers.
pub const SERVERS: [&str; 4] = ["192.0.2.1", "192.0.2.2", "198.51.100.1", "203.0.113.1"];
pub const SERVERS_V6: [&str; 2] = ["2001:db8:1::1", "2001:db8:2::1"];
/// Against hanging.
pub const LONG: Duration = Duration::from_secs(60);

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A set of namespaces; removed when dropped.
pub struct Stage {
    pub name: String,
    pub placement: Placement,
    stop: Arc<AtomicBool>,
    servers: Vec<JoinHandle<()>>,
}

impl Stage {
    pub fn gateway() -> Self {
        let stage =
            Self::new(Placement::Gateway { down: "down".into(), up: "up".into(), own: OWN, boxed: BOXED });
        let [boxed, middle, world] = ["b", "m", "w"].map(|part| stage.space(part));
        ip(&format!(
            "link add name down netns {middle} address 0a:58:a9:fe:01:01 type veth peer name eth0 netns {boxed} address 0a:58:00:00:00:02"
        ));
        ip(&format!(
            "link add near netns {world} address 0a:58:a9:fe:01:02 type veth peer name up netns {middle} address 0a:58:a9:fe:01:03"
        ));
        for line in [
            format!("-n {boxed} link set dev lo up"),
            format!("-n {boxed} link set dev eth0 up"),
            format!("-n {boxed} addr add {BOXED}/32 dev eth0"),
            format!("-n {boxed} route add default via 169.254.1.1 dev eth0 onlink"),
            format!("-n {middle} link set dev lo up"),
            format!("-n {middle} link set dev down up"),
            format!("-n {middle} link set dev up up"),
            format!("-n {middle} addr add 169.254.1.1/32 dev down"),
            format!("-n {middle} addr add {OWN}/32 dev up"),
            format!("-n {middle} route add {BOXED}/32 dev down"),
            format!("-n {middle} route add default via 169.254.1.2 dev up onlink"),
            format!("-n {world} link set dev near up"),
            format!("-n {world} addr add 169.254.1.2/32 dev near"),
            format!("-n {world} route add {BOXED}/32 dev near"),
            format!("-n {world} neigh add {BOXED} lladdr 0a:58:a9:fe:01:03 dev near"),
        ] {
            ip(&line);
        }
        stage.serve()
    }

    pub fn shared() -> Self {
        let stage = Self::new(Placement::Shared { mark: MARK });
        let [boxed, world] = ["b", "w"].map(|part| stage.space(part));
        ip(&format!("link add near netns {world} type veth peer name eth0 netns {boxed}"));
        for line in [
            format!("-n {boxed} link set dev lo up"),
            format!("-n {boxed} link set dev eth0 up"),
            format!("-n {boxed} addr add {BOXED}/24 dev eth0"),
            format!("-n {boxed} addr add 2001:db8::2/64 dev eth0 nodad"),
            format!("-n {world} link set dev near up"),
            format!("-n {world} addr add 10.99.0.1/24 dev near"),
            format!("-n {world} addr add 2001:db8::1/64 dev near nodad"),
            format!("-n {boxed} route add default via 10.99.0.1"),
            format!("-n {boxed} route add default via 2001:db8::1"),
        ] {
            ip(&line);
        }
        stage.serve()
    }

    fn new(placement: Placement) -> Self {
        let name = format!("sgeg{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let stage = Self { name, placement, stop: Arc::default(), servers: Vec::new() };
        for part in ["b", "m", "w"] {
            ip(&format!("netns add {}", stage.space(part)));
        }
        stage
    }

    pub fn space(&self, part: &str) -> String {
        format!("{}{part}", self.name)
    }

    /// Where the program runs.
    pub fn program(&self) -> &'static str {
        match self.placement {
            Placement::Gateway { .. } => "m",
            Placement::Shared { .. } => "b",
        }
    }

    /// The world's servers: 443 and 8443 and 80 echo, 22 greets and echoes, UDP 9999 and 443 echo.
    fn serve(mut self) -> Self {
        let world = self.space("w");
        ip(&format!("-n {world} link set dev lo up"));
        for address in SERVERS.iter().chain(&SERVERS_V6) {
            // Without the search for duplicates it can be used at once.
            let (length, at_once) = if address.contains(':') { (128, " nodad") } else { (32, "") };
            ip(&format!("-n {world} addr add {address}/{length} dev lo{at_once}"));
        }
        for (port, greeting) in [(443, ""), (8443, ""), (80, ""), (22, "SSH-2.0-test\r\n")] {
            let stop = self.stop.clone();
            let listener = inside(&world, move || TcpListener::bind(("::", port)).unwrap());
            self.servers.push(std::thread::spawn(move || echo(&listener, greeting, &stop)));
        }
        // One socket each, because an answer comes from where its socket is bound.
        for (address, port) in SERVERS.iter().chain(&SERVERS_V6).flat_map(|a| [(a, 443), (a, 9999)]) {
            let stop = self.stop.clone();
            let at: SocketAddr = SocketAddr::new(address.parse().unwrap(), port);
            let socket = inside(&world, move || UdpSocket::bind(at).unwrap());
            self.servers.push(std::thread::spawn(move || echo_datagrams(&socket, &stop)));
        }
        self
    }

    /// Runs in the box.
    pub fn boxed<T: Send + 'static>(&self, run: impl FnOnce() -> T + Send + 'static) -> T {
        inside(&self.space("b"), run)
    }

    /// What a client in the box gets.
    pub fn dial(&self, address: &str, port: u16) -> std::io::Result<TcpStream> {
        let to = SocketAddr::new(address.parse().unwrap(), port);
        self.boxed(move || {
            let stream = TcpStream::connect_timeout(&to, LONG)?;
            stream.set_read_timeout(Some(LONG))?;
            Ok(stream)
        })
    }

    pub fn start(&self, world: Arc<Fake>) -> Program {
        let (requests, jobs) = channel::<Job>();
        let (space, placement) = (self.space(self.program()), self.placement.clone());
        let thread = std::thread::spawn(move || {
            enter(&space);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let mut firewall = Firewall::open(placement, Ports::default()).unwrap();
                let inspector = Inspector::open(&firewall, world.clone(), world.clone()).unwrap();
                let inspector = tokio::spawn(inspector.run());
                let denials = tokio::spawn(firewall.denials().unwrap().run(world.clone(), world.clone()));
                loop {
                    match jobs.try_recv() {
                        Ok(job) => job(&mut firewall),
                        Err(std::sync::mpsc::TryRecvError::Disconnected) => break,
                        Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
                    }
                    assert!(!inspector.is_finished() && !denials.is_finished());
                }
            });
        });
        Program { requests: Some(requests), thread: Some(thread) }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for server in self.servers.drain(..) {
            let _ = server.join();
        }
        for part in ["b", "m", "w"] {
            let _ = Command::new("ip").args(["netns", "del", &self.space(part)]).status();
        }
    }
}

type Job = Box<dyn FnOnce(&mut Firewall) + Send>;

/// The program's worker, reduced to its firewall and inspector.
pub struct Program {
    requests: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Program {
    pub fn with<T: Send + 'static>(&self, run: impl FnOnce(&mut Firewall) -> T + Send + 'static) -> T {
        let (tell, told) = channel();
        let job: Job = Box::new(move |firewall| tell.send(run(firewall)).unwrap());
        self.requests.as_ref().unwrap().send(job).unwrap();
        told.recv_timeout(LONG).unwrap()
    }

    pub fn apply(&self, plan: Plan) {
        self.with(move |firewall| firewall.apply(&plan)).unwrap();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.requests.take();
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.unwrap();
        }
    }
}

/// Rules and audit of a test.
pub struct Fake {
    pub default: Action,
    pub allowed: Mutex<Vec<&'static str>>,
    pub denied: Mutex<Vec<&'static str>>,
    pub told: Mutex<Vec<Event>>,
}

impl Fake {
    pub fn new(default: Action, allowed: &[&'static str], denied: &[&'static str]) -> Arc<Self> {
        Arc::new(Self {
            default,
            allowed: Mutex::new(allowed.to_vec()),
            denied: Mutex::new(denied.to_vec()),
            told: Mutex::default(),
        })
    }

    /// Waits until something was told that fits.
    pub fn hears(&self, fits: impl Fn(&Event) -> bool) -> Event {
        let begun = std::time::Instant::now();
        loop {
            if let Some(found) = self.told.lock().unwrap().iter().find(|event| fits(event)) {
                return found.clone();
            }
            assert!(begun.elapsed() < LONG, "{:?}", self.told.lock().unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Rules for Fake {
    fn name(&self, name: &str) -> Verdict {
        if self.denied.lock().unwrap().contains(&name) {
            return Verdict { action: Action::Deny, rule: format!("deny {name}") };
        }
        if self.allowed.lock().unwrap().contains(&name) {
            return Verdict { action: Action::Allow, rule: format!("allow {name}") };
        }
        Verdict { action: self.default, rule: "default".into() }
    }

    fn address(&self, _: IpAddr) -> Option<Verdict> {
        None
    }

    fn default_action(&self) -> Action {
        self.default
    }

    fn networks(&self) -> Vec<(Action, IpNet)> {
        Vec::new()
    }
}

impl Audit for Fake {
    fn tell(&self, event: Event) {
        self.told.lock().unwrap().push(event);
    }
}

/// By default nothing passes; names matter; these addresses are known.
pub fn by_name(known: &[&str]) -> Plan {
    let dynamic = known.iter().map(|address| (address.parse().unwrap(), Duration::from_secs(300))).collect();
    Plan { names: NameGate::On, dynamic, ..Plan::deny_all() }
}

/// Addresses by rule.
pub fn by_address(allow: &[&str], deny: &[&str]) -> Plan {
    let rule = |action, networks: &[&str]| -> Vec<(Action, IpNet)> {
        networks.iter().map(|network| (action, network.parse().unwrap())).collect()
    };
    let mut networks = rule(Action::Allow, allow);
    networks.extend(rule(Action::Deny, deny));
    Plan { networks, ..Plan::deny_all() }
}

/// A real client's first message.
pub fn hello(name: Option<&str>) -> Vec<u8> {
    static CONFIG: OnceLock<Arc<rustls::ClientConfig>> = OnceLock::new();
    let config = CONFIG.get_or_init(|| {
        let config =
            rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
        let config = config.with_safe_default_protocol_versions().unwrap();
        Arc::new(config.with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth())
    });
    let mut config = (**config).clone();
    config.enable_sni = name.is_some();
    let name = name.unwrap_or("unused.example").to_owned().try_into().unwrap();
    let mut connection = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut bytes = Vec::new();
    connection.write_tls(&mut bytes).unwrap();
    bytes
}

/// Sends and wants the same back.
pub fn echoes(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    stream.write_all(bytes)?;
    let mut back = vec![0; bytes.len()];
    stream.read_exact(&mut back)?;
    assert!(back == bytes);
    Ok(())
}

pub fn inside<T: Send + 'static>(space: &str, run: impl FnOnce() -> T + Send + 'static) -> T {
    let space = space.to_owned();
    let thread = std::thread::spawn(move || {
        enter(&space);
        run()
    });
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// This thread lives in the namespace from here on.
pub fn enter(space: &str) {
    use std::os::fd::AsFd;
    let file = File::open(format!("/run/netns/{space}")).unwrap();
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
}

pub fn ip(line: &str) {
    let status = Command::new("ip").args(line.split_whitespace()).status().unwrap();
    assert!(status.success(), "ip {line}");
}

fn echo(listener: &TcpListener, greeting: &'static str, stop: &Arc<AtomicBool>) {
    listener.set_nonblocking(true).unwrap();
    while !stop.load(Ordering::Relaxed) {
        let Ok((mut stream, _)) = listener.accept() else {
            std::thread::sleep(Duration::from_millis(2));
            continue;
        };
        stream.set_nonblocking(false).unwrap();
        let stop = stop.clone();
        std::thread::spawn(move || {
            stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            let mut buffer = vec![0; 256 * 1024];
            let mut result = stream.write_all(greeting.as_bytes());
            while result.is_ok() && !stop.load(Ordering::Relaxed) {
                match stream.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(length) => result = stream.write_all(&buffer[..length]),
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                    Err(_) => break,
                }
            }
            let _ = stream.shutdown(Shutdown::Both);
        });
    }
}

fn echo_datagrams(socket: &UdpSocket, stop: &AtomicBool) {
    socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let mut buffer = [0; 2048];
    while !stop.load(Ordering::Relaxed) {
        if let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let _ = socket.send_to(&buffer[..length], from);
        }
    }
}
