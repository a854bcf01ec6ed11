//! Reads single values of the environment.

use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use ipnet::IpNet;

use super::{Level, Refused, Switch};

/// The environment, and what was odd in it.
pub(super) struct Reading<'a> {
    variable: &'a dyn Fn(&str) -> Option<String>,
    pub(super) warnings: Vec<String>,
}

impl<'a> Reading<'a> {
    pub(super) fn new(variable: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { variable, warnings: Vec::new() }
    }

    /// A value; an empty one is none.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        (self.variable)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    pub(super) fn path(&self, name: &str, default: &str) -> PathBuf {
        self.text(name).unwrap_or_else(|| default.to_owned()).into()
    }

    fn warn(&mut self, name: &str, value: &str, instead: impl Display) {
        self.warnings.push(format!("{name}={value:?} makes no sense: {instead} is used"));
    }

    pub(super) fn number<T>(&mut self, name: &str, default: T, range: RangeInclusive<T>) -> T
    where
        T: FromStr + PartialOrd + Display,
    {
        let Some(text) = self.text(name) else { return default };
        match text.parse() {
            Ok(number) if range.contains(&number) => number,
            _ => {
                self.warn(name, &text, &default);
                default
            }
        }
    }

    pub(super) fn seconds(&mut self, name: &str, default: u64, range: RangeInclusive<u64>) -> Duration {
        Duration::from_secs(self.number(name, default, range))
    }

    pub(super) fn switch(&mut self, name: &str) -> Switch {
        let Some(text) = self.text(name) else { return Switch::Off };
        match text.to_ascii_lowercase().as_str() {
            "1" | "true" | "yes" | "y" | "on" => Switch::On,
            "0" | "false" | "no" | "n" | "off" => Switch::Off,
            _ => {
                self.warn(name, &text, "off");
                Switch::Off
            }
        }
    }

    pub(super) fn level(&mut self, name: &str) -> Level {
        let Some(text) = self.text(name) else { return Level::Info };
        match text.to_ascii_lowercase().as_str() {
            "error" | "fatal" | "panic" => Level::Error,
            "warn" | "warning" => Level::Warn,
            "info" => Level::Info,
            "debug" | "trace" => Level::Debug,
            _ => {
                self.warn(name, &text, "info");
                Level::Info
            }
        }
    }

    /// What is enforced does not depend on the mode; a word that is none is still told.
    pub(super) fn mode(&mut self) {
        const NAME: &str = "OPENSANDBOX_EGRESS_MODE";
        let Some(text) = self.text(NAME) else { return };
        let words: Vec<_> = text.split('+').map(|word| word.trim().to_ascii_lowercase()).collect();
        if !words.contains(&"dns".to_owned()) || words.iter().any(|word| word != "dns" && word != "nft") {
            self.warn(NAME, &text, "dns+nft");
        }
    }

    /// In ascending order, each once. More than `most` are refused: none of them could be left out.
    pub(super) fn ports(&mut self, name: &'static str, most: usize) -> Result<Vec<u16>, Refused> {
        let mut ports = self.each(name, |item| item.parse().ok().filter(|port| *port > 0));
        ports.sort_unstable();
        ports.dedup();
        if ports.len() > most {
            return Err(Refused {
                name,
                problem: format!("a list of {} ports (name {most} at most)", ports.len()),
            });
        }
        Ok(ports)
    }

    pub(super) fn addresses(&mut self, name: &str) -> Vec<IpAddr> {
        self.each(name, |item| item.parse().ok())
    }

    fn each<T>(&mut self, name: &str, read: impl Fn(&str) -> Option<T>) -> Vec<T> {
        let mut found = Vec::new();
        for item in list(self.text(name)) {
            match read(&item) {
                Some(value) => found.push(value),
                None => self.warnings.push(format!("{name}: {item:?} makes no sense and is left out")),
            }
        }
        found
    }

    pub(super) fn networks(&self, name: &'static str) -> Result<Vec<IpNet>, Refused> {
        let read = |item: String| {
            let address = item.parse::<IpAddr>().map(IpNet::from);
            let network = address.or_else(|_| item.parse::<IpNet>());
            network
                .map_err(|_| Refused { name, problem: format!("{item:?}, which is no address or network") })
        };
        list(self.text(name)).map(read).collect()
    }

    pub(super) fn resolvers(&self, name: &'static str) -> Result<Vec<SocketAddr>, Refused> {
        let read = |item: String| {
            let bare = item.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
            let whole = bare.map(|ip| SocketAddr::new(ip, 53)).or_else(|_| item.parse());
            whole.map_err(|_| Refused { name, problem: format!("{item:?}, which is no literal address") })
        };
        list(self.text(name)).map(read).collect()
    }

    pub(super) fn address(&self, name: &'static str, default: Option<Ipv4Addr>) -> Result<Ipv4Addr, Refused> {
        match (self.text(name), default) {
            (Some(text), _) => text
                .parse()
                .map_err(|_| Refused { name, problem: format!("{text:?}, which is no IPv4 address") }),
            (None, Some(default)) => Ok(default),
            (None, None) => Err(Refused { name, problem: "missing".into() }),
        }
    }

    /// `:18080`, `127.0.0.1:18080`, `[::1]:18080`.
    pub(super) fn listen(&self, name: &'static str, port: u16) -> Result<SocketAddr, Refused> {
        let everywhere = |port| SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port);
        let Some(text) = self.text(name) else { return Ok(everywhere(port)) };
        let address = match text.strip_prefix(':') {
            Some(port) => port.parse().map(everywhere).ok(),
            None => text.parse().ok(),
        };
        address.ok_or_else(|| Refused { name, problem: format!("{text:?}, which is no address:port") })
    }

    pub(super) fn web_address(&mut self, name: &str) -> Option<http::Uri> {
        let text = self.text(name)?;
        let read = text
            .parse::<http::Uri>()
            .ok()
            .filter(|uri| uri.host().is_some() && matches!(uri.scheme_str(), Some("http" | "https")));
        if read.is_none() {
            // The address may carry a key.
            self.warnings.push(format!("{name} is no http or https address: nothing is sent"));
        }
        read
    }
}

fn list(text: Option<String>) -> impl Iterator<Item = String> {
    let items: Vec<_> = text.unwrap_or_default().split(',').map(|item| item.trim().to_owned()).collect();
    items.into_iter().filter(|item| !item.is_empty())
}
