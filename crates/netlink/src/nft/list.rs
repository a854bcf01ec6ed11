//! Questions about what tables there are.

use std::io;

use super::attributes::{CHAIN_HOOK, CHAIN_NAME, CHAIN_POLICY, CHAIN_TABLE, HOOK_HOOKNUM};
use super::{INET, SUBSYSTEM};
use crate::message::{DUMP, Message, attributes, family_header, find, number};
use crate::socket::Socket;

/// A chain that hangs on a hook, as the kernel describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseChain {
    pub table: String,
    pub name: String,
    /// One of `NF_INET_*`.
    pub hook: u32,
    /// Whether it drops what none of its rules decides about.
    pub drops: bool,
}

/// Whether the kernel offers nf_tables at all.
pub fn probe() -> io::Result<()> {
    let get = SUBSYSTEM | libc::NFT_MSG_GETTABLE as u16;
    Socket::netfilter()?.dump(Message::new(get, DUMP, &family_header(INET, 0))).map(|_| ())
}

/// The chains of every family that hang on a hook.
pub fn base_chains() -> io::Result<Vec<BaseChain>> {
    let get = SUBSYSTEM | libc::NFT_MSG_GETCHAIN as u16;
    let chains = Socket::netfilter()?.dump(Message::new(get, DUMP, &family_header(0, 0)))?;
    let text = |value: &[u8]| String::from_utf8_lossy(value).trim_end_matches('\0').to_owned();
    let found = chains.iter().filter_map(|(_, body)| {
        let all = attributes(body, 4);
        let hook = attributes(find(&all, CHAIN_HOOK)?, 0);
        Some(BaseChain {
            table: find(&all, CHAIN_TABLE).map(text).unwrap_or_default(),
            name: find(&all, CHAIN_NAME).map(text).unwrap_or_default(),
            hook: find(&hook, HOOK_HOOKNUM).and_then(number)?,
            drops: find(&all, CHAIN_POLICY).and_then(number) == Some(libc::NF_DROP as u32),
        })
    });
    Ok(found.collect())
}
