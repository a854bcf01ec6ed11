//! Numbers, printed, not asserted; and that a swap leaves no window.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use sandglass_egress::firewall::{Doh, Plan};
use sandglass_egress::policy::Action;

use crate::stage::{Fake, LONG, SERVERS, Stage, by_address, by_name, echoes, enter, hello};

#[test]
fn swapping_policies_leaves_no_window() {
    for stage in [Stage::gateway(), Stage::shared()] {
        let program = stage.start(Fake::new(Action::Deny, &["good.example"], &[]));
        program.apply(by_name(&[SERVERS[0]]));
        let mut open = stage.dial(SERVERS[0], 443).unwrap();
        echoes(&mut open, &hello(Some("good.example"))).unwrap();
        let (done, tries) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
        let hammer = {
            let (done, tries, space) = (done.clone(), tries.clone(), stage.space("b"));
            std::thread::spawn(move || {
                enter(&space);
                let denied = SocketAddr::new(SERVERS[3].parse().unwrap(), 443);
                let allowed = SocketAddr::new(SERVERS[0].parse().unwrap(), 443);
                while !done.load(Ordering::Relaxed) {
                    let refused = TcpStream::connect_timeout(&denied, LONG).unwrap_err();
                    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
                    // Neither is what both policies allow refused for a moment.
                    TcpStream::connect_timeout(&allowed, LONG).unwrap();
                    tries.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let mut swaps = 0;
        while swaps < 200 || tries.load(Ordering::Relaxed) < 200 && !hammer.is_finished() {
            swaps += 1;
            let mut plan = by_name(&SERVERS[..1 + swaps % 3]);
            plan.networks = by_address(&["10.0.0.0/8", "172.16.0.0/12"], &["203.0.113.0/24"]).networks;
            program.apply(if swaps % 2 == 0 { plan } else { by_name(&[SERVERS[0]]) });
        }
        done.store(true, Ordering::Relaxed);
        hammer.join().unwrap();
        echoes(&mut open, b"still").unwrap();
        println!("{:?}: {swaps} swaps, {tries:?} attempts", stage.placement);
    }
}

#[test]
fn measure_updates() {
    let stage = Stage::gateway();
    let program = stage.start(Fake::new(Action::Deny, &[], &[]));
    for count in [1_u32, 100, 4096] {
        let networks = (0..count).map(|n| {
            let address = std::net::Ipv4Addr::from(0x0b00_0000 + n * 512);
            (Action::Allow, ipnet::IpNet::from(std::net::IpAddr::V4(address)))
        });
        let dynamic =
            (0..count).map(|n| (std::net::Ipv4Addr::from(0x0c00_0000 + n).into(), Duration::from_secs(100)));
        let plan = Plan {
            networks: networks.collect(),
            dynamic: dynamic.collect(),
            doh: Doh::RefuseEverywhere,
            ..by_name(&[])
        };
        let (took, worked) = program.with(move |firewall| {
            let worked = busy();
            let mut took: Vec<Duration> = (0..20)
                .map(|_| {
                    let begun = Instant::now();
                    firewall.apply(&plan).unwrap();
                    begun.elapsed()
                })
                .collect();
            took.sort_unstable();
            (took, (busy() - worked) / 20)
        });
        let (median, worst) = (took[10], took[19]);
        println!(
            "apply {count} networks and {count} addresses: median {median:?}, worst {worst:?}, work {worked:?}"
        );
    }
    let took = program.with(|firewall| {
        let begun = Instant::now();
        for n in 0..200_u32 {
            let address = std::net::Ipv4Addr::from(0x0d00_0000 + n).into();
            firewall.admit(&[(address, Duration::from_secs(60))]).unwrap();
        }
        begun.elapsed() / 200
    });
    println!("admit one address beside 4096: {took:?}");
}

#[test]
fn measure_connections() {
    for make in [Stage::gateway, Stage::shared] {
        let bare = {
            let stage = make();
            if stage.program() == "m" {
                let forward = "/proc/sys/net/ipv4/ip_forward";
                crate::stage::inside(&stage.space("m"), move || std::fs::write(forward, "1").unwrap());
            }
            numbers(&stage)
        };
        let stage = make();
        let program = stage.start(Fake::new(Action::Deny, &["good.example"], &[]));
        program.apply(by_name(&[SERVERS[0]]));
        let inspected = numbers(&stage);
        println!("{:?}", stage.placement);
        println!("  without a table: {bare:?}");
        println!("  inspected:       {inspected:?}");
        println!("  throughput {:.2}", inspected.megabytes_in_a_second / bare.megabytes_in_a_second);
        println!("  throughput by work {:.2}", bare.work.as_secs_f64() / inspected.work.as_secs_f64());
    }
}

#[derive(Debug)]
#[expect(dead_code, reason = "printed")]
struct Numbers {
    connection: Duration,
    megabytes_in_a_second: f64,
    /// Of the processor, both ends and the kernel between them.
    work: Duration,
}

/// What this thread has worked, whoever else wants the processor.
fn busy() -> Duration {
    rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime).try_into().unwrap()
}

/// What this process has worked.
fn all_busy() -> Duration {
    rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime).try_into().unwrap()
}

/// A new connection with its first exchange, and what goes through an open one.
fn numbers(stage: &Stage) -> Numbers {
    let first = hello(Some("good.example"));
    let mut took: Vec<Duration> = (0..50)
        .map(|_| {
            let (space, first) = (stage.space("b"), first.clone());
            std::thread::spawn(move || {
                enter(&space);
                let begun = Instant::now();
                let mut stream = TcpStream::connect((SERVERS[0], 443)).unwrap();
                echoes(&mut stream, &first).unwrap();
                begun.elapsed()
            })
            .join()
            .unwrap()
        })
        .collect();
    took.sort_unstable();
    let mut stream = stage.dial(SERVERS[0], 443).unwrap();
    echoes(&mut stream, &first).unwrap();
    let mut reader = stream.try_clone().unwrap();
    let total: usize = 256 << 20;
    let (begun, worked) = (Instant::now(), all_busy());
    let writer = std::thread::spawn(move || {
        let chunk = vec![0; 1 << 18];
        for _ in 0..total / chunk.len() {
            stream.write_all(&chunk).unwrap();
        }
    });
    let mut buffer = vec![0; 1 << 18];
    let mut got = 0;
    while got < total {
        got += reader.read(&mut buffer).unwrap();
    }
    writer.join().unwrap();
    Numbers {
        connection: took[25],
        megabytes_in_a_second: total as f64 / 1e6 / begun.elapsed().as_secs_f64(),
        work: all_busy() - worked,
    }
}
