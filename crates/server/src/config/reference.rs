//! The reference page, written from the table of keys. `docs/configuration.md` is its copy; a test keeps it current.

use std::fmt::Write as _;

use serde_json::Value;

use super::load::catalogue;
use super::reader::{Entry, Heading};
use super::show::literal;

const INTRODUCTION: &str = "\
# Configuration

<!-- Written by `SANDGLASS_BLESS=1 cargo test -p sandglass-server reference`. Do not edit. -->

One TOML file: `--config PATH`, else the path in `SANDBOX_CONFIG_PATH`, else `~/.sandbox.toml`. A configuration file of
the OpenSandbox server is accepted unchanged. Without a file the defaults below apply; a file named with `--config`
must exist.

Every key can also be set in the environment as `SANDGLASS_<SECTION>__<KEY>` (a table inside a section adds another
`__`): `SANDGLASS_SERVER__PORT=9000`. The environment wins over the file. Lists are written `a,b`, tables `a=b,c=d`, or
either as a TOML value. The names of the OpenSandbox server work too and are listed with their keys; where both are set,
ours wins.

Numbers and flags may be written as strings. A blank string is the same as leaving an optional key out. A leading `~` in
a path is the home directory. Unknown keys keep the server from starting, so that a typing mistake cannot hide.

`sandglass config check` reports every mistake at once; `sandglass config show` prints each effective value and where it
came from. Secrets are never printed.
";

const VARIABLES: &str = "
## Variables that are not keys

| Variable | Effect |
|---|---|
| `SANDBOX_CONFIG_PATH` | the configuration file |
| `OPENSANDBOX_INSECURE_SERVER` | exactly `YES` permits starting without an API key |
| `OTEL_EXPORTER_OTLP_ENDPOINT`, `…_METRICS_ENDPOINT`, `…_TRACES_ENDPOINT` | where telemetry goes when `otel.endpoint` is unset |
| `OTEL_EXPORTER_OTLP_HEADERS`, `…_TIMEOUT` (milliseconds), `…_COMPRESSION`, `…_CERTIFICATE`, each also per signal | how it is sent |
| `OTEL_METRICS_EXPORTER`, `OTEL_TRACES_EXPORTER` (`otlp` or `none`), `OTEL_SDK_DISABLED` | what is sent |
| `OTEL_RESOURCE_ATTRIBUTES` | further attributes of the resource |
| `OTEL_TRACES_SAMPLER`, `OTEL_TRACES_SAMPLER_ARG` | which requests are traced; by default all whose caller does not say otherwise |
| `OTEL_BSP_SCHEDULE_DELAY`, `OTEL_BSP_MAX_QUEUE_SIZE`, `OTEL_BSP_MAX_EXPORT_BATCH_SIZE` | how traces are collected |
";

/// The whole page.
#[must_use]
pub fn page() -> String {
    let (entries, headings) = catalogue();
    let mut page = INTRODUCTION.to_owned();
    for heading in &headings {
        section(&mut page, heading, &entries);
    }
    page.push_str(VARIABLES);
    page
}

fn section(page: &mut String, heading: &Heading, entries: &[Entry]) {
    let Heading { path, about, .. } = heading;
    let inside = format!("{path}.");
    let own = |entry: &&Entry| entry.key.strip_prefix(&inside).is_some_and(|name| !name.contains('.'));
    let _infallible = write!(page, "\n## `[{path}]`\n\n{about}\n");
    let mut rows = entries.iter().filter(own).peekable();
    if rows.peek().is_none() {
        return;
    }
    page.push_str("\n| Key | Accepts | Default | Meaning |\n|---|---|---|---|\n");
    for entry in rows {
        let name = &entry.key[inside.len()..];
        let default = match &entry.default {
            Value::Null => "unset".to_owned(),
            value => format!("`{}`", literal(value)),
        };
        let upstream =
            entry.variables.iter().skip(1).map(|name| format!(" Also `{name}`.")).collect::<String>();
        let cells =
            [format!("`{name}`"), entry.expects.clone(), default, format!("{}{upstream}", entry.about)];
        let cells = cells.map(|cell| cell.replace('|', "\\|"));
        let _infallible = writeln!(page, "| {} |", cells.join(" | "));
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_reference_page_is_up_to_date() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
        if std::env::var_os("SANDGLASS_BLESS").is_some() {
            std::fs::write(&path, page()).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            written == page(),
            "docs/configuration.md is stale: run SANDGLASS_BLESS=1 cargo test -p sandglass-server reference"
        );
    }

    #[test]
    fn every_key_says_what_it_means() {
        let (entries, headings) = catalogue();
        for entry in &entries {
            assert!(!entry.about.is_empty() && !entry.expects.is_empty(), "{}", entry.key);
        }
        assert!(headings.iter().all(|heading| !heading.about.is_empty()));
    }
}
