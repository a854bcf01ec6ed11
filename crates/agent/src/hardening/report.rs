//! What `capabilities` says about the layers.

use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Active,
    Disabled,
    Degraded,
    Unsupported,
}

/// One layer; the message is never empty.
#[derive(Debug, Clone, Serialize)]
pub struct Layer {
    pub state: State,
    pub message: String,
}

impl Layer {
    fn new(state: State, message: &str) -> Self {
        Layer { state, message: message.to_owned() }
    }

    pub fn active(message: &str) -> Self {
        Self::new(State::Active, message)
    }

    pub fn degraded(message: &str) -> Self {
        Self::new(State::Degraded, message)
    }

    pub fn unsupported(message: &str) -> Self {
        Self::new(State::Unsupported, message)
    }

    fn disabled(section: &str) -> Self {
        Self::new(State::Disabled, &format!("not configured: [{section}] enabled is not set"))
    }
}

/// How the agent came to look after the box's processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Init {
    Pid1,
    Subreaper,
    None,
}

#[derive(Debug, Clone, Serialize)]
pub struct Status {
    pub init_mode: Init,
    /// The kernel keeps signals from inside away from the agent.
    pub signal_shield: bool,
    pub cap_drop: Layer,
    pub seccomp: Layer,
    pub landlock: Layer,
    pub ebpf: Layer,
}

impl Status {
    pub fn disabled() -> Self {
        Status {
            init_mode: Init::None,
            signal_shield: false,
            cap_drop: Layer::disabled("hardening"),
            seccomp: Layer::disabled("hardening"),
            landlock: Layer::disabled("landlock"),
            ebpf: Layer::disabled("ebpf"),
        }
    }

    /// Without init mode the entrypoint is not the agent's child, so no layer reaches it.
    pub fn under(mut self, init: Init) -> Self {
        self.init_mode = init;
        self.signal_shield = init == Init::Pid1;
        if init == Init::None {
            for layer in [&mut self.cap_drop, &mut self.seccomp, &mut self.landlock] {
                if matches!(layer.state, State::Active | State::Degraded) {
                    layer.state = State::Degraded;
                    layer.message = format!(
                        "not in init mode (EXECD_INIT), so the entrypoint is not covered; {}",
                        layer.message
                    );
                }
            }
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outside_init_mode_what_is_on_is_only_half_on() {
        let mut status = Status::disabled();
        status.cap_drop = Layer::active("all");
        let status = status.under(Init::None);
        assert_eq!(status.cap_drop.state, State::Degraded);
        assert!(status.cap_drop.message.contains("EXECD_INIT"));
        assert_eq!(status.seccomp.state, State::Disabled);
        assert!(!status.seccomp.message.is_empty() && !status.signal_shield);
    }
}
