//! `sandglass store`: moving what the server keeps from one database to another.

use anyhow::Result;
use clap::{Args, Subcommand};
use sandglass_server::store::migrate::{DSN_VARIABLE, Moved, Place, migrate};
use serde_json::json;

use crate::output::{Output, note};

/// Move the server's store
#[derive(Args, Debug)]
pub struct Store {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Debug)]
enum Action {
    Migrate(Migrate),
}

/// Copy everything into another store, while no server uses it
///
/// The source is only read. What the target has already stays as it is, so the command may be repeated.
#[derive(Args, Debug)]
struct Migrate {
    /// sqlite:PATH, postgres://…, or postgres for OPENSANDBOX_STORE_POSTGRESQL_DSN
    #[arg(long, value_name = "STORE")]
    from: String,
    /// The same forms; a file is created when it is absent
    #[arg(long, value_name = "STORE")]
    to: String,
    /// Count only, and change nothing
    #[arg(long)]
    dry_run: bool,
}

impl Store {
    /// Runs without a server.
    pub fn run(self, output: Output) -> Result<u8> {
        let Action::Migrate(command) = self.action;
        let dsn = std::env::var(DSN_VARIABLE).ok();
        let from = Place::parse(&at_home(&command.from), dsn.as_deref())?;
        let to = Place::parse(&at_home(&command.to), dsn.as_deref())?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let moved = runtime.block_on(migrate(&from, &to, command.dry_run))?;
        if output.is_json() {
            output.json(
                &json!({ "dryRun": command.dry_run, "tables": moved.iter().map(value).collect::<Vec<_>>() }),
            )?;
        } else {
            output.table(
                &["TABLE", "TOTAL", "MIGRATED", "SKIPPED"],
                &moved.iter().map(row).collect::<Vec<_>>(),
            )?;
            if command.dry_run {
                note("nothing was changed");
            }
        }
        Ok(0)
    }
}

/// No shell expands the sign behind `sqlite:`.
fn at_home(text: &str) -> String {
    match (text.strip_prefix("sqlite:~/"), std::env::var("HOME")) {
        (Some(rest), Ok(home)) => format!("sqlite:{home}/{rest}"),
        _ => text.to_owned(),
    }
}

fn row(moved: &Moved) -> Vec<String> {
    vec![
        moved.table.to_owned(),
        moved.total.to_string(),
        moved.migrated.to_string(),
        moved.skipped.to_string(),
    ]
}

fn value(moved: &Moved) -> serde_json::Value {
    json!({
        "table": moved.table,
        "total": moved.total,
        "migrated": moved.migrated,
        "skipped": moved.skipped,
    })
}
