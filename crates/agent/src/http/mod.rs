//! HTTP/1.1 on a loopback or box address: connections, routing, bodies and error answers.

pub mod body;
pub mod query;
pub mod reply;
pub mod router;
pub mod serve;
pub mod websocket;
