//! Value types with their unit or their secrecy in the type.
//!
//! A [`Secret`] has no `Display` and no `Serialize`, so a new log line or answer cannot leak one by accident.

use std::fmt;
use std::net::Ipv4Addr;

/// A string that is never printed.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Secret(String);

impl Secret {
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value itself. Every caller of this is a place to review.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// An address that may carry credentials (`http://user:password@host`), which are hidden when it is printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Endpoint(String);

impl Endpoint {
    pub fn new(url: impl Into<String>) -> Self {
        Self(url.into())
    }

    /// The whole address, for connecting.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&without_userinfo(&self.0))
    }
}

/// Hides the credentials inside a URL; other text is returned as it is.
pub(super) fn without_userinfo(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return text.to_owned() };
    let authority_end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    match rest[..authority_end].rfind('@') {
        Some(at) => format!("{scheme}://***{}", &rest[at..]),
        None => text.to_owned(),
    }
}

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(u64);

impl ByteSize {
    #[must_use]
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes)
    }

    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }

    /// Reads `1048576`, `100MiB`, `100Mi`, `100MB` or `100M` (the last two are decimal).
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let digits_end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (digits, unit) = text.split_at(digits_end);
        let factor: u64 = match unit.trim_start() {
            "" | "B" => 1,
            "k" | "K" | "kB" | "KB" => 1_000,
            "M" | "MB" => 1_000_000,
            "G" | "GB" => 1_000_000_000,
            "Ki" | "KiB" => 1 << 10,
            "Mi" | "MiB" => 1 << 20,
            "Gi" | "GiB" => 1 << 30,
            _ => return None,
        };
        digits.parse::<u64>().ok()?.checked_mul(factor).map(Self)
    }
}

/// A Kubernetes quantity such as `250m` or `1Gi`; keeps the spelling and an exact value for comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantity {
    text: String,
    nanos: i128,
}

impl Quantity {
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The value in billionths, the finest grain Kubernetes keeps.
    #[must_use]
    pub fn nanos(&self) -> i128 {
        self.nanos
    }

    /// Reads a finite quantity of zero or more, following the grammar of Kubernetes.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let unsigned = text.strip_prefix('+').unwrap_or(text);
        let end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
        let (number, suffix) = unsigned.split_at(end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return None;
        }
        let scale = Scale::parse(suffix)?;
        let mut mantissa: i128 = 0;
        for digit in whole.bytes().chain(fraction.bytes()) {
            mantissa = mantissa.checked_mul(10)?.checked_add(i128::from(digit - b'0'))?;
        }
        // value = mantissa * 10^(9 - fraction digits + exponent) * binary factor, in billionths.
        let power = 9i32.checked_sub(i32::try_from(fraction.len()).ok()?)?.checked_add(scale.exponent)?;
        let scaled = mantissa.checked_mul(scale.binary)?;
        let nanos = if power >= 0 {
            if scaled == 0 { 0 } else { scaled.checked_mul(10i128.checked_pow(power.unsigned_abs())?)? }
        } else {
            // Finer than a billionth is rounded up, as Kubernetes does.
            match 10i128.checked_pow(power.unsigned_abs()) {
                Some(divisor) => scaled / divisor + i128::from(scaled % divisor != 0),
                None => i128::from(scaled != 0),
            }
        };
        Some(Self { text: text.to_owned(), nanos })
    }
}

struct Scale {
    exponent: i32,
    binary: i128,
}

impl Scale {
    fn parse(suffix: &str) -> Option<Self> {
        let decimal = |exponent| Some(Self { exponent, binary: 1 });
        let binary = |shift: u32| Some(Self { exponent: 0, binary: 1i128 << shift });
        match suffix {
            "n" => decimal(-9),
            "u" => decimal(-6),
            "m" => decimal(-3),
            "" => decimal(0),
            "k" => decimal(3),
            "M" => decimal(6),
            "G" => decimal(9),
            "T" => decimal(12),
            "P" => decimal(15),
            "E" => decimal(18),
            "Ki" => binary(10),
            "Mi" => binary(20),
            "Gi" => binary(30),
            "Ti" => binary(40),
            "Pi" => binary(50),
            "Ei" => binary(60),
            _ => {
                let exponent = suffix.strip_prefix(['e', 'E'])?;
                let digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
                if digits.is_empty() || digits.len() > 4 || !digits.bytes().all(|b| b.is_ascii_digit()) {
                    return None;
                }
                decimal(exponent.parse().ok()?)
            }
        }
    }
}

/// An IPv4 network; the address is always the network's first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4Subnet {
    address: Ipv4Addr,
    prefix: u8,
}

impl Ipv4Subnet {
    /// `None` when the prefix is over 32 or the address has bits outside of it.
    #[must_use]
    pub fn new(address: Ipv4Addr, prefix: u8) -> Option<Self> {
        let mask = u32::MAX.checked_shl(32u32.checked_sub(u32::from(prefix))?).unwrap_or(0);
        (u32::from(address) & !mask == 0).then_some(Self { address, prefix })
    }

    /// Reads `10.88.0.0/16`.
    pub fn parse(text: &str) -> Option<Self> {
        let (address, prefix) = text.trim().split_once('/')?;
        Self::new(address.parse().ok()?, prefix.parse().ok()?)
    }

    #[must_use]
    pub fn address(self) -> Ipv4Addr {
        self.address
    }

    #[must_use]
    pub fn prefix(self) -> u8 {
        self.prefix
    }
}

impl fmt::Display for Ipv4Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

/// Where the addresses of embedded sandboxes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubnetChoice {
    /// The first candidate that clashes with nothing on this host, remembered in the state directory.
    Auto,
    Fixed(Ipv4Subnet),
}
