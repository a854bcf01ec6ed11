//! One veth pair for each box, one nftables table for all of them.
//!
//! [`nftables`] is that table, [`link`] what a box's interface consists of. No program of the host (`ip`, `nft`) is
//! needed at run time.

pub mod link;
pub mod nftables;
