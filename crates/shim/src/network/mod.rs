//! Netlink by hand: one veth pair for each box, one nftables table for all of them.
//!
//! No program of the host (`ip`, `nft`) is needed at run time. [`netlink`] is the socket and the encoding, [`route`]
//! the few rtnetlink requests, [`nftables`] the few nfnetlink ones, [`link`] what a box's interface consists of.

pub mod link;
pub mod netlink;
mod nft_attributes;
pub mod nftables;
pub mod route;
