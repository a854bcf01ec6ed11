//! Signals by the names that the protocol has for them.

use russh::Sig;
use rustix::process::Signal;

const NAMES: [(&str, Signal); 16] = [
    ("ABRT", Signal::ABORT),
    ("ALRM", Signal::ALARM),
    ("FPE", Signal::FPE),
    ("HUP", Signal::HUP),
    ("ILL", Signal::ILL),
    ("INT", Signal::INT),
    ("KILL", Signal::KILL),
    ("PIPE", Signal::PIPE),
    ("QUIT", Signal::QUIT),
    ("SEGV", Signal::SEGV),
    ("TERM", Signal::TERM),
    ("USR1", Signal::USR1),
    ("USR2", Signal::USR2),
    // Not in the protocol, but clients send them and programs want them.
    ("TSTP", Signal::TSTP),
    ("CONT", Signal::CONT),
    ("WINCH", Signal::WINCH),
];

/// Other programs' clients put `@` and a domain behind names of their own; those are unknown here.
pub(crate) fn from_name(signal: &Sig) -> Option<Signal> {
    let name = name(signal);
    NAMES.iter().find(|(known, _)| *known == name).map(|(_, signal)| *signal)
}

/// The name of a number, for `exit-signal`.
pub(crate) fn to_name(number: i32) -> Sig {
    match NAMES.iter().find(|(_, signal)| signal.as_raw() == number) {
        Some((name, _)) => from_text(name),
        None => Sig::Custom(format!("SIG{number}@sandglass")),
    }
}

fn name(signal: &Sig) -> &str {
    match signal {
        Sig::ABRT => "ABRT",
        Sig::ALRM => "ALRM",
        Sig::FPE => "FPE",
        Sig::HUP => "HUP",
        Sig::ILL => "ILL",
        Sig::INT => "INT",
        Sig::KILL => "KILL",
        Sig::PIPE => "PIPE",
        Sig::QUIT => "QUIT",
        Sig::SEGV => "SEGV",
        Sig::TERM => "TERM",
        Sig::USR1 => "USR1",
        Sig::Custom(name) => name,
    }
}

/// The protocol library sends the name that it is given.
fn from_text(name: &str) -> Sig {
    Sig::Custom(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_agree() {
        assert_eq!(from_name(&Sig::TERM), Some(Signal::TERM));
        assert_eq!(from_name(&Sig::Custom("USR2".into())), Some(Signal::USR2));
        assert_eq!(from_name(&Sig::Custom("STOP@example".into())), None);
        assert_eq!(name(&to_name(9)), "KILL");
        assert_eq!(name(&to_name(31)), "SIG31@sandglass");
    }
}
