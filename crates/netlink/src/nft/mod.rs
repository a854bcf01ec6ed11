//! Tables of nf_tables: [`batch`] changes them in one transaction, [`rule`] is what a chain consists of, [`list`] asks
//! what is there, [`meter`] counts.

mod attributes;
pub mod batch;
pub mod list;
pub mod meter;
pub mod rule;

const SUBSYSTEM: u16 = (libc::NFNL_SUBSYS_NFTABLES as u16) << 8;
/// Tables see both IPv4 and IPv6.
const INET: u8 = 1;
