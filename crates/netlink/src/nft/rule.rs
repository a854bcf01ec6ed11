//! A rule: conditions, and what is done with a packet that meets all of them.
//!
//! Values are compared as they lie in the packet or the kernel: addresses and ports in network order, marks and states
//! in the machine's.

use std::net::IpAddr;

use super::attributes::*;
use super::meter::{self, Meter};
use crate::message::Message;

const REGISTER: u32 = libc::NFT_REG_1 as u32;
/// A second one, for what is needed together with the first.
const SECOND_REGISTER: u32 = libc::NFT_REG_2 as u32;
const EQUAL: u32 = libc::NFT_CMP_EQ as u32;
const DIFFERENT: u32 = libc::NFT_CMP_NEQ as u32;

/// The first of the registers of four bytes; the ones above are the same memory in pieces of sixteen.
const WORDS: u32 = libc::NFT_REG32_00 as u32;

/// `ct state` bits.
pub mod state {
    pub const INVALID: u32 = 1;
    pub const ESTABLISHED: u32 = 2;
    pub const RELATED: u32 = 4;
    pub const NEW: u32 = 8;
}

/// `ct status` bit of a connection whose destination was rewritten.
pub const STATUS_DESTINATION_REWRITTEN: u32 = 1 << 5;

/// Something of a packet, or of the connection that it belongs to, which can be compared.
#[derive(Clone, Copy, Debug)]
pub enum Field {
    InputInterface,
    /// Four bytes, and never the same for two interfaces one after the other.
    InputInterfaceIndex,
    OutputInterface,
    /// `NFPROTO_IPV4` or `NFPROTO_IPV6`, one byte.
    Family,
    /// `IPPROTO_*`, one byte.
    Protocol,
    Mark,
    ConnectionState,
    /// One byte: 0 for packets in the direction of the first one, 1 for answers.
    ConnectionDirection,
    ConnectionStatus,
    ConnectionMark,
    /// Bytes of the IP header.
    Network {
        offset: u32,
        length: u32,
    },
    /// Bytes of the header behind it, and what it carries.
    Transport {
        offset: u32,
        length: u32,
    },
}

impl Field {
    pub const IPV4_SOURCE: Self = Self::Network { offset: 12, length: 4 };
    pub const IPV4_DESTINATION: Self = Self::Network { offset: 16, length: 4 };
    pub const IPV6_SOURCE: Self = Self::Network { offset: 8, length: 16 };
    pub const IPV6_DESTINATION: Self = Self::Network { offset: 24, length: 16 };
    pub const DESTINATION_PORT: Self = Self::Transport { offset: 2, length: 2 };
    pub const SOURCE_PORT: Self = Self::Transport { offset: 0, length: 2 };
    pub const TCP_FLAGS: Self = Self::Transport { offset: 13, length: 1 };
    pub const ICMP_TYPE: Self = Self::Transport { offset: 0, length: 1 };

    /// How many registers of four bytes it takes.
    fn words(self) -> u32 {
        match self {
            Self::Network { length, .. } | Self::Transport { length, .. } => length.div_ceil(4),
            Self::InputInterface | Self::OutputInterface => libc::IFNAMSIZ as u32 / 4,
            _ => 1,
        }
    }
}

/// What becomes of the packet.
#[derive(Clone, Copy, Debug)]
pub enum Verdict<'a> {
    Accept,
    Drop,
    /// Continues behind the rule that jumped here.
    Return,
    /// Continues in another chain and comes back.
    Jump(&'a str),
    /// Continues in another chain for good.
    Goto(&'a str),
}

/// How the sender learns that a packet was refused.
#[derive(Clone, Copy, Debug)]
pub enum Reject {
    /// Only for TCP.
    TcpReset,
    /// An ICMP message: prohibited by the administration.
    Prohibited,
}

/// How packets get into a queue; kernels differ in what they have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueBy {
    /// nf_tables' own expression.
    Expression,
    /// The xtables target, through the compatibility layer.
    Target,
}

/// How a change of the IP header is made good in its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    None,
    Ipv4Header,
}

/// A rule under construction: conditions and actions in the order in which they were added.
#[derive(Clone, Debug)]
pub struct Rule {
    list: Message,
}

impl Default for Rule {
    fn default() -> Self {
        Self::new()
    }
}

impl Rule {
    /// Matches every packet.
    pub fn new() -> Self {
        Self { list: Message::fragment() }
    }

    pub(super) fn expressions(&self) -> &[u8] {
        self.list.bytes()
    }

    /// Compares as many bytes as `value` has.
    pub fn is(self, field: Field, value: &[u8]) -> Self {
        self.load(field).compare(EQUAL, value)
    }

    pub fn is_not(self, field: Field, value: &[u8]) -> Self {
        self.load(field).compare(DIFFERENT, value)
    }

    /// The field's bits under `mask` are those of `value`.
    pub fn is_masked(self, field: Field, mask: &[u8], value: &[u8]) -> Self {
        self.load(field).masked(mask).compare(EQUAL, value)
    }

    pub fn is_not_masked(self, field: Field, mask: &[u8], value: &[u8]) -> Self {
        self.load(field).masked(mask).compare(DIFFERENT, value)
    }

    /// At least one of the bits is set in a field of four bytes in the machine's order.
    pub fn has_any(self, field: Field, bits: u32) -> Self {
        self.is_not_masked(field, &bits.to_ne_bytes(), &[0; 4])
    }

    /// None of the bits is set.
    pub fn has_none(self, field: Field, bits: u32) -> Self {
        self.is_masked(field, &bits.to_ne_bytes(), &[0; 4])
    }

    /// The packet came in through exactly this interface.
    pub fn from_interface(self, name: &str) -> Self {
        self.is(Field::InputInterface, &interface(name))
    }

    /// The packet leaves through exactly this interface.
    pub fn to_interface(self, name: &str) -> Self {
        self.is(Field::OutputInterface, &interface(name))
    }

    /// The packet does not leave through this interface.
    pub fn not_to_interface(self, name: &str) -> Self {
        self.is_not(Field::OutputInterface, &interface(name))
    }

    pub fn ipv4(self) -> Self {
        self.is(Field::Family, &[libc::NFPROTO_IPV4 as u8])
    }

    pub fn ipv6(self) -> Self {
        self.is(Field::Family, &[libc::NFPROTO_IPV6 as u8])
    }

    /// One of `IPPROTO_*`.
    pub fn protocol(self, number: u8) -> Self {
        self.is(Field::Protocol, &[number])
    }

    pub fn destination_port(self, port: u16) -> Self {
        self.is(Field::DESTINATION_PORT, &port.to_be_bytes())
    }

    pub fn state(self, bits: u32) -> Self {
        self.has_any(Field::ConnectionState, bits)
    }

    /// The packet answers one that opened its connection.
    pub fn answering(self) -> Self {
        self.is(Field::ConnectionDirection, &[1])
    }

    pub fn in_set(self, field: Field, set: &str) -> Self {
        self.load(field)
            .expression("lookup", |data| data.string(LOOKUP_SET, set).network(LOOKUP_SREG, REGISTER))
    }

    /// The fields together are an element of the set.
    pub fn in_set_of(self, fields: &[Field], set: &str) -> Self {
        let mut register = WORDS;
        let mut rule = self;
        for field in fields {
            rule = rule.load_into(*field, register);
            register += field.words();
        }
        rule.expression("lookup", |data| data.string(LOOKUP_SET, set).network(LOOKUP_SREG, WORDS))
    }

    pub fn not_in_set(self, field: Field, set: &str) -> Self {
        self.load(field).expression("lookup", |data| {
            data.string(LOOKUP_SET, set).network(LOOKUP_SREG, REGISTER).network(LOOKUP_FLAGS, 1)
        })
    }

    /// No more than so many packets in a second, after a first burst, meet the rule.
    pub fn at_most(self, each_second: u32, burst: u32) -> Self {
        self.element(|element| meter::rate(element, each_second, burst, |data| data))
    }

    /// What is over the meter meets the rule.
    pub fn over(self, meter: Meter) -> Self {
        self.element(|element| meter.over(element))
    }

    /// The same with a meter for each value of a field. The set is one of [`Holding::Rates`] or [`Holding::Connections`], as
    /// the meter is; beyond its size values are not counted, and never over.
    ///
    /// [`Holding::Rates`]: super::batch::Holding::Rates
    /// [`Holding::Connections`]: super::batch::Holding::Connections
    pub fn over_for_each(self, field: Field, set: &str, meter: Meter) -> Self {
        const ADD: u32 = 0;
        const UPDATE: u32 = 1;
        /// Milliseconds after which the bucket of whoever is silent is full again anyway.
        const SILENT: u64 = 60_000;
        self.load(field).expression("dynset", |data| {
            let data = data.string(DYNSET_SET_NAME, set).network(DYNSET_SREG_KEY, REGISTER);
            let data = match meter {
                Meter::Rate { .. } => {
                    data.network(DYNSET_OP, UPDATE).attribute(DYNSET_TIMEOUT, &SILENT.to_be_bytes())
                }
                Meter::Connections(_) => data.network(DYNSET_OP, ADD),
            };
            data.nest(DYNSET_EXPR, |element| meter.over(element))
        })
    }

    /// Counts packets for whoever lists the rule.
    pub fn counted(self) -> Self {
        self.expression("counter", |data| data)
    }

    pub fn set_mark(self, mark: u32) -> Self {
        self.immediate(REGISTER, &mark.to_ne_bytes()).expression("meta", |data| {
            data.network(META_KEY, libc::NFT_META_MARK as u32).network(META_SREG, REGISTER)
        })
    }

    pub fn set_connection_mark(self, mark: u32) -> Self {
        self.immediate(REGISTER, &mark.to_ne_bytes()).expression("ct", |data| {
            data.network(CT_KEY, libc::NFT_CT_MARK as u32).network(CT_SREG, REGISTER)
        })
    }

    /// Replaces the bits under `mask` in the IP header. Fields that a checksum covers start at an even offset and have
    /// two bytes.
    pub fn write(self, (offset, length): (u32, u32), mask: &[u8], value: &[u8], checksum: Checksum) -> Self {
        let keep: Vec<u8> = mask.iter().map(|byte| !byte).collect();
        self.load(Field::Network { offset, length }).mangled(&keep, value).expression("payload", |data| {
            let data = data
                .network(PAYLOAD_SREG, REGISTER)
                .network(PAYLOAD_BASE, libc::NFT_PAYLOAD_NETWORK_HEADER as u32)
                .network(PAYLOAD_OFFSET, offset)
                .network(PAYLOAD_LEN, length);
            match checksum {
                Checksum::None => data,
                Checksum::Ipv4Header => data.network(PAYLOAD_CSUM_TYPE, 1).network(PAYLOAD_CSUM_OFFSET, 10),
            }
        })
    }

    /// Overwrites a TCP option by ones that mean nothing, the first of its kind. Needs Linux 5.18.
    pub fn strip_tcp_option(self, kind: u8) -> Self {
        self.expression("exthdr", |data| {
            data.attribute(EXTHDR_TYPE, &[kind]).network(EXTHDR_OP, EXTHDR_TCP_OPTION)
        })
    }

    /// Reports the packet's first bytes to the listeners of a group.
    pub fn log(self, group: u16, prefix: &str, bytes: u32) -> Self {
        self.expression("log", |data| {
            data.attribute(LOG_GROUP, &group.to_be_bytes())
                .string(LOG_PREFIX, prefix)
                .network(LOG_SNAPLEN, bytes)
        })
    }

    /// Lets whoever has opened the queue decide; the packet is dropped if nobody has.
    pub fn queue(self, number: u16, by: QueueBy) -> Self {
        match by {
            QueueBy::Expression => {
                self.expression("queue", |data| data.attribute(QUEUE_NUM, &number.to_be_bytes()))
            }
            QueueBy::Target => {
                // The number, in the machine's order, in a structure that is padded to eight bytes.
                let mut info = [0; 8];
                info[..2].copy_from_slice(&number.to_ne_bytes());
                self.expression("target", |data| {
                    data.string(TARGET_NAME, "NFQUEUE").network(TARGET_REV, 0).attribute(TARGET_INFO, &info)
                })
            }
        }
    }

    /// To a port of this machine.
    pub fn redirect(self, port: u16) -> Self {
        self.immediate(REGISTER, &port.to_be_bytes())
            .expression("redir", |data| data.network(REDIR_PROTO_MIN, REGISTER))
    }

    /// To another destination.
    pub fn rewrite_destination(self, address: IpAddr, port: u16) -> Self {
        let family = nat_family(address);
        self.immediate(REGISTER, &octets(address)).immediate(SECOND_REGISTER, &port.to_be_bytes()).expression(
            "nat",
            |data| {
                data.network(NAT_TYPE, 1)
                    .network(NAT_FAMILY, family)
                    .network(NAT_ADDR_MIN, REGISTER)
                    .network(NAT_PROTO_MIN, SECOND_REGISTER)
            },
        )
    }

    /// From another source.
    pub fn rewrite_source(self, address: IpAddr) -> Self {
        let family = nat_family(address);
        self.immediate(REGISTER, &octets(address)).expression("nat", |data| {
            data.network(NAT_TYPE, 0).network(NAT_FAMILY, family).network(NAT_ADDR_MIN, REGISTER)
        })
    }

    /// From the address of the interface that it leaves through.
    pub fn masquerade(self) -> Self {
        self.expression("masq", |data| data)
    }

    pub fn reject(self, how: Reject) -> Self {
        let (kind, code) = match how {
            Reject::TcpReset => (1, 0),
            Reject::Prohibited => (2, 3),
        };
        self.expression("reject", |data| data.network(REJECT_TYPE, kind).attribute(REJECT_CODE, &[code]))
    }

    pub fn verdict(self, verdict: Verdict<'_>) -> Self {
        let (code, chain) = match verdict {
            Verdict::Accept => (libc::NF_ACCEPT, None),
            Verdict::Drop => (libc::NF_DROP, None),
            Verdict::Return => (libc::NFT_RETURN, None),
            Verdict::Jump(chain) => (libc::NFT_JUMP, Some(chain)),
            Verdict::Goto(chain) => (libc::NFT_GOTO, Some(chain)),
        };
        self.expression("immediate", |data| {
            data.network(IMMEDIATE_DREG, libc::NFT_REG_VERDICT as u32).nest(IMMEDIATE_DATA, |value| {
                value.nest(DATA_VERDICT, |nest| {
                    let nest = nest.network(VERDICT_CODE, code as u32);
                    match chain {
                        Some(chain) => nest.string(VERDICT_CHAIN, chain),
                        None => nest,
                    }
                })
            })
        })
    }

    fn load(self, field: Field) -> Self {
        self.load_into(field, REGISTER)
    }

    fn load_into(self, field: Field, register: u32) -> Self {
        let meta = |rule: Self, key: libc::c_int| {
            rule.expression("meta", |data| data.network(META_DREG, register).network(META_KEY, key as u32))
        };
        let connection = |rule: Self, key: libc::c_int| {
            rule.expression("ct", |data| data.network(CT_DREG, register).network(CT_KEY, key as u32))
        };
        let payload = |rule: Self, base: libc::c_int, offset, length| {
            rule.expression("payload", |data| {
                data.network(PAYLOAD_DREG, register)
                    .network(PAYLOAD_BASE, base as u32)
                    .network(PAYLOAD_OFFSET, offset)
                    .network(PAYLOAD_LEN, length)
            })
        };
        match field {
            Field::InputInterface => meta(self, libc::NFT_META_IIFNAME),
            Field::InputInterfaceIndex => meta(self, libc::NFT_META_IIF),
            Field::OutputInterface => meta(self, libc::NFT_META_OIFNAME),
            Field::Family => meta(self, libc::NFT_META_NFPROTO),
            Field::Protocol => meta(self, libc::NFT_META_L4PROTO),
            Field::Mark => meta(self, libc::NFT_META_MARK),
            Field::ConnectionState => connection(self, libc::NFT_CT_STATE),
            Field::ConnectionDirection => connection(self, libc::NFT_CT_DIRECTION),
            Field::ConnectionStatus => connection(self, libc::NFT_CT_STATUS),
            Field::ConnectionMark => connection(self, libc::NFT_CT_MARK),
            Field::Network { offset, length } => {
                payload(self, libc::NFT_PAYLOAD_NETWORK_HEADER, offset, length)
            }
            Field::Transport { offset, length } => {
                payload(self, libc::NFT_PAYLOAD_TRANSPORT_HEADER, offset, length)
            }
        }
    }

    fn masked(self, mask: &[u8]) -> Self {
        self.mangled(mask, &vec![0; mask.len()])
    }

    /// `register & keep ^ flip`.
    fn mangled(self, keep: &[u8], flip: &[u8]) -> Self {
        self.expression("bitwise", |data| {
            data.network(BITWISE_SREG, REGISTER)
                .network(BITWISE_DREG, REGISTER)
                .network(BITWISE_LEN, keep.len() as u32)
                .nest(BITWISE_MASK, |nest| nest.attribute(DATA_VALUE, keep))
                .nest(BITWISE_XOR, |nest| nest.attribute(DATA_VALUE, flip))
        })
    }

    fn compare(self, operator: u32, value: &[u8]) -> Self {
        self.expression("cmp", |data| {
            data.network(CMP_SREG, REGISTER)
                .network(CMP_OP, operator)
                .nest(CMP_DATA, |nest| nest.attribute(DATA_VALUE, value))
        })
    }

    fn immediate(self, register: u32, value: &[u8]) -> Self {
        self.expression("immediate", |data| {
            data.network(IMMEDIATE_DREG, register)
                .nest(IMMEDIATE_DATA, |nest| nest.attribute(DATA_VALUE, value))
        })
    }

    fn expression(self, name: &str, fill: impl FnOnce(Message) -> Message) -> Self {
        self.element(|element| element.string(EXPR_NAME, name).nest(EXPR_DATA, fill))
    }

    fn element(self, fill: impl FnOnce(Message) -> Message) -> Self {
        Self { list: self.list.nest(LIST_ELEM, fill) }
    }
}

/// All bytes of the kernel's field, so that a longer name does not match.
fn interface(name: &str) -> [u8; libc::IFNAMSIZ] {
    let mut bytes = [0; libc::IFNAMSIZ];
    let length = name.len().min(libc::IFNAMSIZ - 1);
    bytes[..length].copy_from_slice(&name.as_bytes()[..length]);
    bytes
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn nat_family(address: IpAddr) -> u32 {
    match address {
        IpAddr::V4(_) => libc::NFPROTO_IPV4 as u32,
        IpAddr::V6(_) => libc::NFPROTO_IPV6 as u32,
    }
}
