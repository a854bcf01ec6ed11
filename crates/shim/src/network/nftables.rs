//! The nftables table that keeps boxes apart from the host and from each other, as an nfnetlink batch.
//!
//! Invariant: the whole table is replaced in one transaction, so there is no moment without rules.

use std::io;
use std::net::Ipv4Addr;

use super::netlink::{ACK, APPEND, CREATE, Message, Socket, attributes};
use super::nft_attributes::*;

const SUBSYSTEM: u16 = (libc::NFNL_SUBSYS_NFTABLES as u16) << 8;
const BATCH_BEGIN: u16 = libc::NFNL_MSG_BATCH_BEGIN as u16;
const BATCH_END: u16 = libc::NFNL_MSG_BATCH_END as u16;
const INET: u8 = 1;

const REGISTER: u32 = libc::NFT_REG_1 as u32;
const DROP: u32 = libc::NF_DROP as u32;
const ACCEPT: u32 = libc::NF_ACCEPT as u32;

/// `ct state` bits.
const ESTABLISHED_OR_RELATED: u32 = 0b110;

/// One condition or action of a rule.
enum Term<'a> {
    InterfaceIn(&'a str),
    InterfaceOut(&'a str),
    NotInterfaceOut(&'a str),
    Reply,
    Ipv4,
    Source(Ipv4Addr, u8),
    NotSource(Ipv4Addr, u8),
    Destination(Ipv4Addr, u8),
    Verdict(u32),
    Masquerade,
}

/// Puts the table for boxes whose host interfaces start with `prefix` in place.
pub fn install(prefix: &str, subnet: (Ipv4Addr, u8)) -> io::Result<()> {
    use Term::{
        Destination, InterfaceIn, InterfaceOut, Ipv4, Masquerade, NotInterfaceOut, NotSource, Reply, Source,
        Verdict,
    };
    let link_local = Ipv4Addr::new(169, 254, 0, 0);
    let table = prefix;
    let rules: Vec<(&str, Vec<Term<'_>>)> = vec![
        // Nobody speaks for an address that is not a box's, and no box asks the cloud's metadata service.
        ("forward", vec![InterfaceIn(prefix), InterfaceOut(prefix), Verdict(DROP)]),
        ("forward", vec![InterfaceIn(prefix), Ipv4, NotSource(subnet.0, subnet.1), Verdict(DROP)]),
        ("forward", vec![InterfaceIn(prefix), Ipv4, Destination(link_local, 16), Verdict(DROP)]),
        ("forward", vec![InterfaceIn(prefix), Verdict(ACCEPT)]),
        ("forward", vec![InterfaceOut(prefix), Reply, Verdict(ACCEPT)]),
        ("forward", vec![InterfaceOut(prefix), Verdict(DROP)]),
        ("input", vec![InterfaceIn(prefix), Reply, Verdict(ACCEPT)]),
        ("input", vec![InterfaceIn(prefix), Verdict(DROP)]),
        ("postrouting", vec![Ipv4, Source(subnet.0, subnet.1), NotInterfaceOut(prefix), Masquerade]),
    ];
    let mut batch = vec![marker(BATCH_BEGIN), add_table(table), delete_table(table), add_table(table)];
    batch.push(add_chain(table, "forward", "filter", libc::NF_INET_FORWARD as u32, 0));
    batch.push(add_chain(table, "input", "filter", libc::NF_INET_LOCAL_IN as u32, 0));
    batch.push(add_chain(table, "postrouting", "nat", libc::NF_INET_POST_ROUTING as u32, 100));
    batch.extend(rules.iter().map(|(chain, terms)| add_rule(table, chain, terms)));
    batch.push(marker(BATCH_END));
    Socket::netfilter()?.transact(batch).map_err(|(_, error)| error)
}

/// Removes the table; absent is fine.
pub fn uninstall(prefix: &str) -> io::Result<()> {
    // Adding first makes the deletion succeed either way.
    let batch = vec![marker(BATCH_BEGIN), add_table(prefix), delete_table(prefix), marker(BATCH_END)];
    Socket::netfilter()?.transact(batch).map_err(|(_, error)| error)
}

/// Whether the kernel offers nf_tables at all.
pub fn probe() -> io::Result<()> {
    let get = SUBSYSTEM | libc::NFT_MSG_GETTABLE as u16;
    Socket::netfilter()?.dump(Message::new(get, super::netlink::DUMP, &family(INET, 0))).map(|_| ())
}

/// Tables with a forward chain that drops what it does not know, as `family table chain`.
pub fn foreign_forward_drops() -> io::Result<Vec<String>> {
    let get = SUBSYSTEM | libc::NFT_MSG_GETCHAIN as u16;
    let chains = Socket::netfilter()?.dump(Message::new(get, super::netlink::DUMP, &family(0, 0)))?;
    let number = |value: &[u8]| value.first_chunk::<4>().map(|bytes| u32::from_be_bytes(*bytes));
    let text = |value: &[u8]| String::from_utf8_lossy(value).trim_end_matches('\0').to_owned();
    let mut found = Vec::new();
    for (_, body) in chains {
        let all = attributes(&body, 4);
        let get = |kind| all.iter().find(|(k, _)| *k == kind).map(|(_, value)| *value);
        let hook = get(CHAIN_HOOK).map(|nest| attributes(nest, 0));
        let hook = hook.and_then(|hook| {
            hook.iter().find(|(kind, _)| *kind == HOOK_HOOKNUM).and_then(|(_, v)| number(v))
        });
        let drops = get(CHAIN_POLICY).and_then(number) == Some(DROP);
        if drops && hook == Some(libc::NF_INET_FORWARD as u32) {
            let name = |kind| get(kind).map(text).unwrap_or_default();
            found.push(format!("table {} chain {}", name(CHAIN_TABLE), name(CHAIN_NAME)));
        }
    }
    Ok(found)
}

fn marker(kind: u16) -> Message {
    Message::new(kind, 0, &family(0, libc::NFNL_SUBSYS_NFTABLES as u16))
}

fn add_table(table: &str) -> Message {
    message(libc::NFT_MSG_NEWTABLE, CREATE).string(TABLE_NAME, table)
}

fn delete_table(table: &str) -> Message {
    message(libc::NFT_MSG_DELTABLE, 0).string(TABLE_NAME, table)
}

fn add_chain(table: &str, chain: &str, kind: &str, hook: u32, priority: i32) -> Message {
    message(libc::NFT_MSG_NEWCHAIN, CREATE)
        .string(CHAIN_TABLE, table)
        .string(CHAIN_NAME, chain)
        .nest(CHAIN_HOOK, |nest| nest.network(HOOK_HOOKNUM, hook).network(HOOK_PRIORITY, priority as u32))
        .network(CHAIN_POLICY, ACCEPT)
        .string(CHAIN_TYPE, kind)
}

fn add_rule(table: &str, chain: &str, terms: &[Term<'_>]) -> Message {
    message(libc::NFT_MSG_NEWRULE, CREATE | APPEND)
        .string(RULE_TABLE, table)
        .string(RULE_CHAIN, chain)
        .nest(RULE_EXPRESSIONS, |list| terms.iter().fold(list, encode))
}

fn encode(list: Message, term: &Term<'_>) -> Message {
    const EQUAL: u32 = libc::NFT_CMP_EQ as u32;
    const DIFFERENT: u32 = libc::NFT_CMP_NEQ as u32;
    // Comparing fewer bytes than an interface name has is how `name*` is written.
    let interface =
        |list, key, operator, prefix: &str| compare(load_meta(list, key), operator, prefix.as_bytes());
    let network = |list, offset, operator, (address, len): (Ipv4Addr, u8)| {
        let mask = u32::MAX.checked_shl(32 - u32::from(len)).unwrap_or(0);
        let list = masked(load_ipv4(list, offset), &mask.to_be_bytes());
        compare(list, operator, &(address.to_bits() & mask).to_be_bytes())
    };
    match term {
        Term::InterfaceIn(prefix) => interface(list, libc::NFT_META_IIFNAME, EQUAL, prefix),
        Term::InterfaceOut(prefix) => interface(list, libc::NFT_META_OIFNAME, EQUAL, prefix),
        Term::NotInterfaceOut(prefix) => interface(list, libc::NFT_META_OIFNAME, DIFFERENT, prefix),
        Term::Reply => {
            let loaded = expression(list, "ct", |data| {
                data.network(CT_DREG, REGISTER).network(CT_KEY, libc::NFT_CT_STATE as u32)
            });
            compare(masked(loaded, &ESTABLISHED_OR_RELATED.to_ne_bytes()), DIFFERENT, &[0; 4])
        }
        Term::Ipv4 => compare(load_meta(list, libc::NFT_META_NFPROTO), EQUAL, &[libc::NFPROTO_IPV4 as u8]),
        Term::Source(address, len) => network(list, 12, EQUAL, (*address, *len)),
        Term::NotSource(address, len) => network(list, 12, DIFFERENT, (*address, *len)),
        Term::Destination(address, len) => network(list, 16, EQUAL, (*address, *len)),
        Term::Masquerade => expression(list, "masq", |data| data),
        Term::Verdict(code) => expression(list, "immediate", |data| {
            data.network(IMMEDIATE_DREG, libc::NFT_REG_VERDICT as u32).nest(IMMEDIATE_DATA, |value| {
                value.nest(DATA_VERDICT, |verdict| verdict.network(VERDICT_CODE, *code))
            })
        }),
    }
}

fn load_meta(list: Message, key: libc::c_int) -> Message {
    expression(list, "meta", |data| data.network(META_DREG, REGISTER).network(META_KEY, key as u32))
}

fn load_ipv4(list: Message, offset: u32) -> Message {
    expression(list, "payload", |data| {
        data.network(PAYLOAD_DREG, REGISTER)
            .network(PAYLOAD_BASE, libc::NFT_PAYLOAD_NETWORK_HEADER as u32)
            .network(PAYLOAD_OFFSET, offset)
            .network(PAYLOAD_LEN, 4)
    })
}

fn masked(list: Message, mask: &[u8; 4]) -> Message {
    expression(list, "bitwise", |data| {
        data.network(BITWISE_SREG, REGISTER)
            .network(BITWISE_DREG, REGISTER)
            .network(BITWISE_LEN, 4)
            .nest(BITWISE_MASK, |nest| nest.attribute(DATA_VALUE, mask))
            .nest(BITWISE_XOR, |nest| nest.attribute(DATA_VALUE, &[0; 4]))
    })
}

fn compare(list: Message, operator: u32, value: &[u8]) -> Message {
    expression(list, "cmp", |data| {
        data.network(CMP_SREG, REGISTER)
            .network(CMP_OP, operator)
            .nest(CMP_DATA, |nest| nest.attribute(DATA_VALUE, value))
    })
}

fn expression(list: Message, name: &str, fill: impl FnOnce(Message) -> Message) -> Message {
    list.nest(LIST_ELEM, |element| element.string(EXPR_NAME, name).nest(EXPR_DATA, fill))
}

fn message(kind: libc::c_int, flags: u16) -> Message {
    Message::new(SUBSYSTEM | kind as u16, ACK | flags, &family(INET, 0))
}

fn family(family: u8, resource: u16) -> [u8; 4] {
    let resource = resource.to_be_bytes();
    [family, 0, resource[0], resource[1]]
}
