//! Namespaces and the links between them, gone when the test ends.

use std::fs::File;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Where the program stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Gateway,
    Shared,
}

pub const BOX: &str = "192.0.2.2";

/// One network namespace.
#[derive(Debug)]
pub struct Namespace {
    pub name: String,
}

impl Namespace {
    fn new(part: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("sgt{}-{}-{part}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        run(&["ip", "netns", "add", &name]);
        let made = Self { name };
        made.ip("link set lo up");
        made
    }

    /// `ip` with these arguments, inside.
    pub fn ip(&self, arguments: &str) {
        let mut words = vec!["ip", "-n", &self.name];
        words.extend(arguments.split_whitespace());
        run(&words);
    }

    /// Runs in a thread that is inside.
    pub fn within<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                self.enter();
                act()
            });
            match thread.join() {
                Ok(value) => value,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Moves this thread inside, for good.
    pub fn enter(&self) {
        let file = File::open(format!("/run/netns/{}", self.name)).unwrap();
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}

/// A sandbox, the world, and the namespace that the program runs in.
pub struct Stage {
    pub place: Place,
    pub world: Namespace,
    pub sandbox: Namespace,
    middle: Option<Namespace>,
}

impl Stage {
    pub fn new(place: Place) -> Self {
        let world = Namespace::new("world");
        let sandbox = Namespace::new("box");
        let middle = (place == Place::Gateway).then(|| Namespace::new("middle"));
        let stage = Self { place, world, sandbox, middle };
        // Servers answer at addresses of their own.
        for last in [10, 11, 12, 20, 53] {
            stage.world.ip(&format!("addr add 203.0.113.{last}/32 dev lo"));
        }
        stage.world.ip("addr add 10.9.9.9/32 dev lo");
        match &stage.middle {
            Some(middle) => stage.lay_through(middle),
            None => stage.lay_straight(),
        }
        stage
    }

    fn lay_straight(&self) {
        let (world, sandbox) = (&self.world, &self.sandbox);
        world.ip(&format!("link add name host0 type veth peer name eth0 netns {}", sandbox.name));
        world.ip("addr add 198.51.100.1/32 dev host0");
        world.ip("link set host0 up");
        world.ip(&format!("route add {BOX}/32 dev host0"));
        sandbox.ip(&format!("addr add {BOX}/32 dev eth0"));
        sandbox.ip("link set eth0 up");
        sandbox.ip("route add 198.51.100.1/32 dev eth0");
        sandbox.ip("route add default via 198.51.100.1");
    }

    fn lay_through(&self, middle: &Namespace) {
        let (world, sandbox) = (&self.world, &self.sandbox);
        world.ip(&format!("link add name host0 type veth peer name up netns {}", middle.name));
        middle.ip(&format!("link add name down type veth peer name eth0 netns {}", sandbox.name));
        world.ip("addr add 198.51.100.1/32 dev host0");
        world.ip("link set host0 up");
        world.ip(&format!("route add {BOX}/32 via inet 169.254.1.3 dev host0 onlink"));
        middle.ip("link set dev up up");
        middle.ip("link set dev down up");
        middle.ip("addr add 169.254.1.3/32 dev up");
        middle.ip("route add 198.51.100.1/32 dev up");
        middle.ip("route add default via 198.51.100.1 dev up src 169.254.1.3 onlink");
        middle.ip("addr add 169.254.1.1/32 dev down");
        middle.ip(&format!("route add {BOX}/32 dev down"));
        sandbox.ip(&format!("addr add {BOX}/32 dev eth0"));
        sandbox.ip("link set eth0 up");
        sandbox.ip("route add 169.254.1.1/32 dev eth0");
        sandbox.ip("route add default via 169.254.1.1");
    }

    /// Where the program runs.
    pub fn ground(&self) -> &Namespace {
        self.middle.as_ref().unwrap_or(&self.sandbox)
    }
}

fn run(words: &[&str]) {
    let output = Command::new(words[0]).args(&words[1..]).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {told}");
}
