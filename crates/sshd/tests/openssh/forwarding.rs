//! Ports in both directions, by policy.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};

use sandglass_sshd::{Forwarding, Limits};

use crate::host::{Host, Options, noise, text, wait_for};

fn host(forwarding: Forwarding) -> Host {
    Host::with(Options { forwarding, limits: Limits::default(), ..Options::default() })
}

/// Sends everything back until the other side has ended.
fn echo_server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = stream.unwrap();
            let mut writer = reader.try_clone().unwrap();
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut reader, &mut writer);
                let _ = writer.shutdown(Shutdown::Write);
            });
        }
    });
    port
}

/// Below those that the kernel gives away by itself, so that nobody gets it in between. Not found out by listening: a closed socket
/// lives on for a moment in a child that another test starts just then.
fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let number = u32::from(NEXT.fetch_add(1, Ordering::Relaxed)) + std::process::id() * 500;
        let port = u16::try_from(10_000 + number % 20_000).unwrap();
        if TcpStream::connect(("127.0.0.1", port)).is_err() {
            return port;
        }
    }
}

/// A client that only forwards; ended when dropped.
struct Forwarder(Child);

impl Forwarder {
    fn start(host: &Host, arguments: &[&str]) -> Self {
        let mut ssh = host.ssh(&[&["-N", "-oExitOnForwardFailure=yes"], arguments].concat());
        Forwarder(ssh.stderr(Stdio::piped()).spawn().unwrap())
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn echo(stream: TcpStream, bytes: &[u8]) -> Vec<u8> {
    let mut reader = stream.try_clone().unwrap();
    let mut writer = stream;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _ = writer.write_all(bytes);
            let _ = writer.shutdown(Shutdown::Write);
        });
        let mut back = Vec::new();
        let _ = reader.read_to_end(&mut back);
        back
    })
}

fn connect(port: u16) -> TcpStream {
    wait_for("the forwarded port", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    TcpStream::connect(("127.0.0.1", port)).unwrap()
}

#[test]
fn a_local_port_leads_into_the_sandbox_with_every_byte() {
    let host = host(Forwarding::LoopbackOnly);
    let (here, there) = (free_port(), echo_server());
    let _forwarder = Forwarder::start(&host, &["-L", &format!("127.0.0.1:{here}:localhost:{there}")]);
    let bytes = noise(20 << 20);
    assert!(echo(connect(here), &bytes) == bytes);
    let small: Vec<_> = (0..20).map(|n| noise(1000 * n)).collect();
    std::thread::scope(|scope| {
        for bytes in &small {
            scope.spawn(move || assert!(&echo(connect(here), bytes) == bytes));
        }
    });
}

#[test]
fn a_stream_that_nobody_reads_does_not_stop_the_others_and_is_bounded() {
    let host = host(Forwarding::LoopbackOnly);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent_port = silent.local_addr().unwrap().port();
    let (stuck, free, there) = (free_port(), free_port(), echo_server());
    let _forwarder = Forwarder::start(
        &host,
        &[
            "-L",
            &format!("127.0.0.1:{stuck}:127.0.0.1:{silent_port}"),
            "-L",
            &format!("127.0.0.1:{free}:127.0.0.1:{there}"),
        ],
    );
    let mut stream = connect(stuck);
    stream.set_nonblocking(true).unwrap();
    let mut sent = 0;
    wait_for("the stuck stream to be full", || {
        let before = sent_more(&mut stream);
        sent += before;
        before == 0
    });
    assert!(sent < 64 << 20, "{sent} bytes went nowhere");
    assert_eq!(echo(connect(free), &noise(200_000)).len(), 200_000);
}

fn sent_more(stream: &mut TcpStream) -> usize {
    let mut sent = 0;
    while let Ok(count) = stream.write(&[7; 65536]) {
        sent += count;
    }
    std::thread::sleep(std::time::Duration::from_millis(300));
    sent
}

#[test]
fn what_the_policy_forbids_is_refused() {
    let there = echo_server();
    for (forwarding, target) in [
        (Forwarding::Off, format!("127.0.0.1:{there}")),
        (Forwarding::LoopbackOnly, "192.0.2.1:80".to_owned()),
        (Forwarding::LoopbackOnly, format!("0.0.0.0:{there}")),
    ] {
        let host = host(forwarding);
        let output = host.ssh(&["-W", &target]).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && stderr.contains("administratively prohibited"),
            "{target}: {stderr}"
        );
    }
    let host = host(Forwarding::Any);
    host.authorize(&[&host.public_line("user", "no-port-forwarding ")]);
    let output = host.ssh(&["-W", &format!("127.0.0.1:{there}")]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("administratively prohibited"));
}

#[test]
fn a_port_that_nobody_listens_on_is_told_apart_from_a_forbidden_one() {
    let host = host(Forwarding::LoopbackOnly);
    let output = host.ssh(&["-W", &format!("127.0.0.1:{}", free_port())]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("connect failed"));
}

#[test]
fn a_remote_port_leads_out_of_the_sandbox() {
    let host = host(Forwarding::LoopbackOnly);
    let (inside, there) = (free_port(), echo_server());
    let _forwarder = Forwarder::start(&host, &["-R", &format!("{inside}:127.0.0.1:{there}")]);
    let bytes = noise(5 << 20);
    assert!(echo(connect(inside), &bytes) == bytes);
}

#[test]
fn a_remote_port_may_be_chosen_by_the_server_and_ends_with_the_connection() {
    let host = host(Forwarding::Any);
    let there = echo_server();
    let mut ssh = host.ssh(&["-N", "-R", &format!("127.0.0.1:0:127.0.0.1:{there}")]);
    let mut child = ssh.stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let port: u16 = line.strip_prefix("Allocated port ").unwrap().split(' ').next().unwrap().parse().unwrap();
    assert_eq!(echo(connect(port), b"hello"), b"hello");
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for("the port to be closed", || TcpStream::connect(("127.0.0.1", port)).is_err());
}

#[test]
fn a_remote_port_that_the_policy_forbids_is_refused() {
    for (forwarding, port) in
        [(Forwarding::Off, "0:127.0.0.1:1"), (Forwarding::LoopbackOnly, "192.0.2.1:0:127.0.0.1:1")]
    {
        let host = host(forwarding);
        let output = host.ssh(&["-oExitOnForwardFailure=yes", "-R", port]).arg("true").output().unwrap();
        assert!(String::from_utf8_lossy(&output.stderr).contains("remote port forwarding failed"));
    }
}

#[test]
fn other_kinds_of_channels_are_refused() {
    let host = host(Forwarding::Any);
    let socket = host.path("a.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let here = free_port();
    let _forwarder = Forwarder::start(&host, &["-L", &format!("127.0.0.1:{here}:{}", socket.display())]);
    let mut nothing = Vec::new();
    let _ = connect(here).read_to_end(&mut nothing);
    assert!(nothing.is_empty());
    // An agent and a display are asked for, not given, and nothing else suffers.
    let said = text(host.ssh(&["-A", "-X"]).env("DISPLAY", ":9").arg("echo [$SSH_AUTH_SOCK$DISPLAY]"));
    assert_eq!(said, "[]");
}

/// A channel type that the server has never heard of: a tunnel of network packets. The client needs a device for that,
/// so it runs in a network namespace of its own and reaches the server through its Unix socket.
#[test]
fn an_unknown_kind_of_channel_is_refused() {
    if !crate::host::is_root() || !std::path::Path::new("/dev/net/tun").exists() {
        return;
    }
    let host = host(Forwarding::Any);
    host.serve_unix("ssh.sock");
    let through = format!("ProxyCommand={}", proxy(&host));
    let mut command = Command::new("unshare");
    let ssh = host.ssh(&[
        "-o",
        &through,
        "-oHostKeyAlias=box",
        "-oTunnel=point-to-point",
        "-oTunnelDevice=any:any",
    ]);
    command.arg("-n").arg("ssh").args(ssh.get_args()).arg("echo in").stdin(Stdio::null());
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    if stderr.contains("unshare") || stderr.contains("Tunnel device open failed") {
        eprintln!("skipped: no network namespace or no tunnel device here");
        return;
    }
    assert!(stderr.contains("unknown channel type") || stderr.contains("open failed"), "{stderr}");
}

fn proxy(host: &Host) -> String {
    let program = "import socket,sys,threading,os\n\
        s=socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\n\
        def up():\n\x20while (b:=os.read(0,65536)): s.sendall(b)\n\x20s.shutdown(socket.SHUT_WR)\n\
        threading.Thread(target=up,daemon=True).start()\n\
        while (b:=s.recv(65536)): os.write(1,b)\n";
    std::fs::write(host.path("proxy.py"), program).unwrap();
    format!("python3 {} {}", host.path("proxy.py").display(), host.path("ssh.sock").display())
}

#[test]
fn a_unix_socket_serves_as_a_port_does() {
    let host = host(Forwarding::Off);
    host.serve_unix("ssh.sock");
    let through = format!("ProxyCommand={}", proxy(&host));
    let mut ssh = host.ssh(&["-o", &through, "-oHostKeyAlias=box"]);
    assert_eq!(text(ssh.arg("echo $SSH_CONNECTION")), "UNKNOWN 65535 UNKNOWN 65535");
}
