//! `sandglass completions`: scripts that complete commands and flags.

use anyhow::Result;
use clap::{Args, ValueEnum};
use clap_complete::Shell;

use crate::output::print;

#[derive(ValueEnum, Debug, Clone, Copy)]
enum Kind {
    Bash,
    Zsh,
    Fish,
}

/// Print a completion script for a shell
#[derive(Args, Debug)]
#[command(after_help = "Example: source <(sandglass completions bash)")]
pub struct Completions {
    #[arg(value_enum)]
    shell: Kind,
}

impl Completions {
    pub fn run(self) -> Result<u8> {
        let shell = match self.shell {
            Kind::Bash => Shell::Bash,
            Kind::Zsh => Shell::Zsh,
            Kind::Fish => Shell::Fish,
        };
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut crate::grammar(), "sandglass", &mut script);
        print(&script)?;
        Ok(0)
    }
}
