//! The two sides against each other: in virtual time with every fault there is, and over a real socket.

mod end_to_end;
mod simulation;
mod test_server;
