//! Addresses of the boxes: one subnet per state directory, one slot per box. The slot gives the address and the range of host ids.

use std::{
    collections::HashSet,
    net::{IpAddr, Ipv4Addr},
    path::Path,
    sync::{Mutex, PoisonError},
};

use sandglass_sandbox::{
    SandboxId,
    ports::{RuntimeErrorKind, runtime::RuntimeError},
};
use sandglass_shim::{
    host_network::{self, Subnet},
    spec::{IdRange, NetworkSpec},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    EmbeddedConfig,
    subnet::{self, Held},
};

/// Host ids of slot 0. Far above what distributions hand out to people, services and rootless containers.
const FIRST_ID: u32 = 0x4000_0000;
const IDS_PER_BOX: u32 = 0x1_0000;
/// Slots whose id range still fits 32 bits.
const MAX_SLOT: u32 = (u32::MAX - FIRST_ID) / IDS_PER_BOX - 1;
/// The default gateway of every box: link-local, carried by no interface, answered by the host's end of the veth.
const GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);

#[derive(Serialize, Deserialize)]
struct Saved {
    subnet: Subnet,
    prefix: String,
}

#[derive(Debug)]
pub(super) struct Network {
    subnet: Subnet,
    /// Tests have none: they make no boxes.
    _held: Option<Held>,
    prefix: String,
    mtu: u32,
    dns: Vec<IpAddr>,
    search: Vec<String>,
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    taken: HashSet<u32>,
    next: u32,
}

pub(super) fn failed(message: impl Into<String>) -> RuntimeError {
    RuntimeError::new(RuntimeErrorKind::Failed, "network", message)
}

impl Network {
    pub(super) fn open(config: &EmbeddedConfig) -> Result<Self, RuntimeError> {
        let file = config.state_dir.join("network.json");
        let saved = std::fs::read(&file).ok().and_then(|raw| serde_json::from_slice::<Saved>(&raw).ok());
        let held = hold(config, saved.as_ref().map(|saved| saved.subnet))?;
        if !(8..=28).contains(&held.subnet.prefix_len) {
            return Err(failed("[embedded] subnet must have a prefix length between 8 and 28"));
        }
        let kept = saved.filter(|saved| config.subnet.is_none() || saved.subnet == held.subnet);
        let prefix = kept.map_or_else(|| prefix(&config.state_dir), |saved| saved.prefix);
        let saved = Saved { subnet: held.subnet, prefix };
        let raw = serde_json::to_vec_pretty(&saved).map_err(|e| failed(e.to_string()))?;
        std::fs::write(&file, raw).map_err(|e| failed(format!("cannot write {}: {e}", file.display())))?;
        let limits = host_network::ensure(&saved.prefix, saved.subnet).map_err(|e| failed(describe(&e)))?;
        if limits == host_network::Limits::Missing {
            tracing::warn!(
                "this kernel cannot count connections (CONFIG_NFT_CONNLIMIT): one sandbox can fill the host's table of them"
            );
        }
        let (dns, search) = resolver(config);
        Ok(Self {
            subnet: saved.subnet,
            _held: Some(held),
            prefix: saved.prefix,
            mtu: uplink_mtu(),
            dns,
            search,
            slots: Mutex::default(),
        })
    }

    pub(super) fn remove(&self) -> Result<(), RuntimeError> {
        host_network::remove(&self.prefix).map_err(|e| failed(describe(&e)))
    }

    fn capacity(&self) -> u32 {
        let hosts = (1u64 << (32 - self.subnet.prefix_len)) - 2;
        u32::try_from(hosts).unwrap_or(u32::MAX).min(MAX_SLOT)
    }

    /// A slot nobody holds. Slots are handed out in turn, so that an address is reused as late as possible.
    pub(super) fn take(&self) -> Result<u32, RuntimeError> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let capacity = self.capacity();
        for _ in 0..capacity {
            let slot = slots.next % capacity + 1;
            slots.next = slots.next.wrapping_add(1) % capacity;
            if slots.taken.insert(slot) {
                return Ok(slot);
            }
        }
        let message =
            format!("all {capacity} addresses of the subnet are in use; choose a larger [embedded] subnet");
        Err(RuntimeError::new(RuntimeErrorKind::Exhausted, "network", message))
    }

    /// Marks the slot of a box that was found.
    pub(super) fn adopt(&self, address: Ipv4Addr) {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = u32::from(address).wrapping_sub(u32::from(self.subnet.address));
        slots.taken.insert(slot);
        slots.next = slots.next.max(slot % self.capacity().max(1));
    }

    pub(super) fn give_back(&self, address: Ipv4Addr) {
        let slot = u32::from(address).wrapping_sub(u32::from(self.subnet.address));
        self.give_back_slot(slot);
    }

    pub(super) fn give_back_slot(&self, slot: u32) {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).taken.remove(&slot);
    }

    pub(super) fn ids(slot: u32) -> IdRange {
        IdRange { base: FIRST_ID + slot * IDS_PER_BOX, count: IDS_PER_BOX }
    }

    /// The host user of a box's egress enforcer. The range of slot 0 is no box's, and has one for every slot.
    pub(super) fn enforcer(slot: u32) -> u32 {
        FIRST_ID + slot
    }

    pub(super) fn of_box(&self, id: SandboxId, slot: u32) -> NetworkSpec {
        let hex: String = id.to_string().chars().filter(|c| *c != '-').take(9).collect();
        NetworkSpec {
            address: Ipv4Addr::from(u32::from(self.subnet.address) + slot),
            gateway: GATEWAY,
            host_interface: format!("{}{hex}", self.prefix),
            mtu: self.mtu,
            dns: self.dns.clone(),
            search: self.search.clone(),
        }
    }
}

pub(super) fn describe(e: &host_network::NetworkError) -> String {
    format!("{e} (run `sandglass doctor` to see what this machine lacks)")
}

/// Interface names start with this: six characters, so that nine of the sandbox id fit behind it.
fn prefix(state_dir: &Path) -> String {
    let path = std::fs::canonicalize(state_dir).unwrap_or_else(|_| state_dir.to_path_buf());
    let digest = Sha256::digest(path.as_os_str().as_encoded_bytes());
    format!("sg{:02x}{:02x}", digest[0], digest[1])
}

/// The subnet this server uses from now on, held against other servers.
fn hold(config: &EmbeddedConfig, saved: Option<Subnet>) -> Result<Held, RuntimeError> {
    if let Some(wanted) = config.subnet {
        return subnet::keep(wanted, "set another [embedded] subnet");
    }
    // Boxes of an earlier run keep their addresses, so an automatic choice is made anew only while there are none.
    let boxes =
        std::fs::read_dir(config.state_dir.join("sandboxes")).is_ok_and(|mut all| all.next().is_some());
    match saved {
        Some(saved) if boxes => subnet::keep(
            saved,
            "start this server, whose sandboxes have addresses in it, before that one, which takes another if it has no sandboxes",
        ),
        _ => subnet::choose(saved, &subnet::candidates()),
    }
}

fn resolver(config: &EmbeddedConfig) -> (Vec<IpAddr>, Vec<String>) {
    if !config.dns.is_empty() {
        return (config.dns.clone(), Vec::new());
    }
    let parse = |path: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let words = |key: &'static str| {
            text.lines().filter_map(move |line| line.trim().strip_prefix(key)).flat_map(str::split_whitespace)
        };
        // A resolver on the host's loopback cannot be reached from a box.
        let servers: Vec<IpAddr> = words("nameserver ")
            .filter_map(|w| w.parse().ok())
            .filter(|a: &IpAddr| !a.is_loopback() && a.is_ipv4())
            .collect();
        let search: Vec<String> = words("search ").filter(|w| *w != ".").map(str::to_owned).collect();
        (servers, search)
    };
    let found = parse("/etc/resolv.conf");
    if found.0.is_empty() { parse("/run/systemd/resolve/resolv.conf") } else { found }
}

/// The MTU of the interface with the default route, so that boxes never send what the uplink cannot carry.
fn uplink_mtu() -> u32 {
    let routes = std::fs::read_to_string("/proc/net/route").unwrap_or_default();
    routes
        .lines()
        .skip(1)
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|words| words.get(1) == Some(&"00000000"))
        .and_then(|words| std::fs::read_to_string(format!("/sys/class/net/{}/mtu", words[0])).ok())
        .and_then(|mtu| mtu.trim().parse().ok())
        .unwrap_or(1500)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(prefix_len: u8) -> Network {
        let subnet = Subnet { address: Ipv4Addr::new(10, 9, 0, 0), prefix_len };
        Network {
            subnet,
            _held: None,
            prefix: "sgtest".into(),
            mtu: 1500,
            dns: vec![],
            search: vec![],
            slots: Mutex::default(),
        }
    }

    #[test]
    fn slots_are_reused_late_and_run_out_with_a_message() {
        let net = network(28);
        let taken: Vec<_> = (0..14).map(|_| net.take().unwrap()).collect();
        assert_eq!(taken, (1..=14).collect::<Vec<_>>());
        assert_eq!(net.take().unwrap_err().kind, RuntimeErrorKind::Exhausted);
        net.give_back(Ipv4Addr::new(10, 9, 0, 3));
        assert_eq!(net.take().unwrap(), 3);
    }

    #[test]
    fn a_found_box_keeps_its_address() {
        let net = network(24);
        net.adopt(Ipv4Addr::new(10, 9, 0, 1));
        assert_ne!(net.take().unwrap(), 1);
    }

    #[test]
    fn names_fit_the_kernel_and_id_ranges_do_not_touch() {
        let spec = network(16).of_box(SandboxId::random(), 7);
        assert_eq!(spec.host_interface.len(), 15);
        assert_eq!(spec.address, Ipv4Addr::new(10, 9, 0, 7));
        assert_eq!(Network::ids(8).base - Network::ids(7).base, Network::ids(7).count);
        assert!(Network::enforcer(1) > FIRST_ID && Network::enforcer(MAX_SLOT) < Network::ids(1).base);
        assert!(Network::ids(MAX_SLOT).base.checked_add(IDS_PER_BOX - 1).is_some());
    }
}
