//! Ctrl-C and SIGTERM as values.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// What the user or the system asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interrupt {
    /// Ctrl-C.
    Stop,
    /// SIGTERM: somebody ends us.
    Quit,
}

impl Interrupt {
    /// The exit code by which a shell reports the signal.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Stop => 130,
            Self::Quit => 143,
        }
    }
}

/// Delivers interrupts in the order of their arrival. From creation on, Ctrl-C no longer ends the program by itself.
#[derive(Debug)]
pub struct Interrupts {
    stop: Signal,
    quit: Signal,
}

impl Interrupts {
    /// Takes the two signals over.
    pub fn listen() -> io::Result<Self> {
        Ok(Self { stop: signal(SignalKind::interrupt())?, quit: signal(SignalKind::terminate())? })
    }

    /// Waits for the next one. Safe to cancel.
    pub async fn next(&mut self) -> Interrupt {
        tokio::select! {
            Some(()) = self.stop.recv() => Interrupt::Stop,
            Some(()) = self.quit.recv() => Interrupt::Quit,
            else => std::future::pending().await,
        }
    }
}
