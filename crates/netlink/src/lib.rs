//! Netlink by hand: what the kernel is told and asked about links, packet filters and connections.
//!
//! No program of the host (`ip`, `nft`, `conntrack`) is needed at run time. [`message`] is the encoding and [`socket`]
//! the transport; [`route`] has the requests for links, addresses and routes, [`nft`] tables, sets and rules,
//! [`conntrack`] the list of connections, [`queue`] packets that wait for a verdict and [`log`] packets that were
//! reported. What a table is for is the business of those who use this.

pub mod conntrack;
pub mod log;
pub mod message;
pub mod nft;
pub mod queue;
pub mod route;
pub mod socket;
