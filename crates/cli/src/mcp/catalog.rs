//! The list of tools: names, schemas, hints, and what each does.
//!
//! Names are public: models are told them in prompts that we do not see. A change shows in the snapshot of the list.

use std::{future::Future, pin::Pin, sync::Arc};

use rmcp::{
    handler::server::common::{schema_for_input, schema_for_output},
    model::{CallToolResult, JsonObject, Tool, ToolAnnotations},
    schemars::JsonSchema,
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::{call::Call, failure::Failure, files, lifecycle, processes, snapshots};

/// What a tool does to the world, as the protocol's hints tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// Nothing.
    Reads,
    /// Makes something new each time.
    Adds,
    /// Brings something into a state; once more changes nothing.
    Sets,
    /// Removes or overwrites; once more changes nothing.
    Destroys,
    /// Anything, and not only in the sandbox: commands may reach the network.
    Anything,
}

impl Effect {
    fn hints(self) -> ToolAnnotations {
        ToolAnnotations::new()
            .read_only(self == Self::Reads)
            .destructive(matches!(self, Self::Destroys | Self::Anything))
            .idempotent(matches!(self, Self::Reads | Self::Sets | Self::Destroys))
            .open_world(self == Self::Anything)
    }
}

/// When the client takes a call back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cancellation {
    /// The tool is dropped where it stands.
    Drop,
    /// The tool sees to it, because it has something to undo.
    Own,
}

type Answer = Pin<Box<dyn Future<Output = Result<Value, Failure>> + Send>>;
type Run = Box<dyn Fn(Call, JsonObject) -> Answer + Send + Sync>;

struct Entry {
    tool: Tool,
    cancellation: Cancellation,
    run: Run,
}

/// All tools.
pub struct Catalog(Vec<Entry>);

impl std::fmt::Debug for Catalog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|entry| &entry.tool.name)).finish()
    }
}

/// Arguments of `opensandbox-mcp` that mean nothing here: a sandbox need not be connected to before it is used.
const MEANINGLESS: &[&str] = &["connect_if_missing", "health_check_polling_interval_ms"];

impl Catalog {
    /// The descriptions, in the order in which they are listed.
    pub fn tools(&self) -> Vec<Tool> {
        self.0.iter().map(|entry| entry.tool.clone()).collect()
    }

    /// One description.
    pub fn tool(&self, name: &str) -> Option<Tool> {
        self.0.iter().find(|entry| entry.tool.name == name).map(|entry| entry.tool.clone())
    }

    /// Runs a tool; `None` when there is none of this name.
    pub async fn call(&self, name: &str, call: Call, mut arguments: JsonObject) -> Option<CallToolResult> {
        let entry = self.0.iter().find(|entry| entry.tool.name == name)?;
        for meaningless in MEANINGLESS {
            arguments.remove(*meaningless);
        }
        let run = (entry.run)(call.clone(), arguments);
        let outcome = match entry.cancellation {
            Cancellation::Own => run.await,
            Cancellation::Drop => tokio::select! {
                outcome = run => outcome,
                () = call.cancelled() => Err(Failure::cancelled()),
            },
        };
        Some(outcome.map_or_else(Failure::into_result, CallToolResult::structured))
    }

    fn with<A, R, F>(
        mut self,
        name: &'static str,
        effect: Effect,
        text: &'static str,
        run: fn(Call, A) -> F,
    ) -> Self
    where
        A: DeserializeOwned + JsonSchema + Send + 'static,
        R: Serialize + JsonSchema + 'static,
        F: Future<Output = Result<R, Failure>> + Send + 'static,
    {
        let (title, description) = text.split_once(": ").expect("a title and a description");
        let input = schema_for_input::<A>().expect("arguments are a struct");
        let tool = Tool::new(name, description, input)
            .with_title(title)
            .with_raw_output_schema(schema_for_output::<R>())
            .with_annotations(effect.hints());
        let run: Run = Box::new(move |call, arguments| {
            let read = serde_json::from_value::<A>(Value::Object(arguments));
            Box::pin(async move {
                let arguments = read.map_err(|error| Failure::arguments(error.to_string()))?;
                let result = run(call, arguments).await?;
                serde_json::to_value(result).map_err(|error| Failure::new("FAILED", error.to_string()))
            })
        });
        self.0.push(Entry { tool, cancellation: Cancellation::Drop, run });
        self
    }

    /// The tool added last sees to its cancellation itself.
    fn undoing(mut self) -> Self {
        if let Some(last) = self.0.last_mut() {
            last.cancellation = Cancellation::Own;
        }
        self
    }

    /// Makes the list.
    pub fn all() -> Arc<Self> {
        Arc::new(Self(Vec::new()).sandboxes().commands().files().snapshots())
    }

    fn sandboxes(self) -> Self {
        self.with("sandbox_create", Effect::Adds,
            "Create a sandbox: Start an isolated Linux sandbox from a container image or a snapshot and wait until commands \
             can run in it. Returns its sandbox_id, which every other tool needs. It is removed when its time to live is over; \
             sandbox_renew moves that, sandbox_kill ends it at once.",
            lifecycle::create).undoing()
        .with("sandbox_connect", Effect::Reads,
            "Find a sandbox: Check that an existing sandbox can be used, and wait for it if it is starting or resuming. Not \
             needed before other tools.",
            lifecycle::connect)
        .with("sandbox_kill", Effect::Destroys,
            "Remove a sandbox: End everything in a sandbox and remove it with its files. Cannot be undone.",
            lifecycle::kill)
        .with("sandbox_get_info", Effect::Reads,
            "Describe a sandbox: State, image, entrypoint, labels and time of expiry of one sandbox.",
            lifecycle::get_info)
        .with("sandbox_list", Effect::Reads,
            "List sandboxes: All sandboxes that this server's key may see, newest first, filtered by state and labels.",
            lifecycle::list)
        .with("sandbox_renew", Effect::Sets,
            "Extend a sandbox's life: Let a sandbox expire a given number of seconds from now.",
            lifecycle::renew)
        .with("sandbox_pause", Effect::Sets,
            "Pause a sandbox: Freeze every process of a sandbox. Its files stay, its time to live goes on.",
            lifecycle::pause)
        .with("sandbox_resume", Effect::Sets,
            "Resume a sandbox: Let a paused sandbox go on where it stopped.",
            lifecycle::resume)
        .with("sandbox_get_metrics", Effect::Reads,
            "Measure a sandbox: Processors and memory of a sandbox, and how much of them is used.",
            lifecycle::metrics)
        .with("sandbox_healthcheck", Effect::Reads,
            "Check a sandbox: Whether commands can run in a sandbox right now, and why not.",
            lifecycle::healthcheck)
        .with("sandbox_get_endpoint", Effect::Reads,
            "Expose a port: Address, and headers to send, of a port that something in the sandbox listens on.",
            lifecycle::get_endpoint)
        .with("sandbox_diagnostics", Effect::Reads,
            "Diagnose a sandbox: What a sandbox's entrypoint printed, what happened to the sandbox, or a summary; works \
             also when it does not start.",
            lifecycle::diagnostics)
    }

    fn commands(self) -> Self {
        self.with("command_run", Effect::Anything,
            "Run a command: Run a shell command line in a sandbox, wait for its end and return its exit code, stdout and \
             stderr. A nonzero exit code is a result, not an error of this tool. With background true it returns an id \
             at once.",
            processes::run).undoing()
        .with("command_status", Effect::Reads,
            "Look at a command: Whether a command still runs, and its exit code.",
            processes::status)
        .with("command_logs", Effect::Reads,
            "Read a command's output: Output of a background command, from a cursor on.",
            processes::logs)
        .with("command_interrupt", Effect::Destroys,
            "Stop a command: Ask a running command to end, and kill it if it does not within seconds.",
            processes::interrupt)
    }

    fn files(self) -> Self {
        self.with("file_read", Effect::Reads,
            "Read a file: Content of a file in a sandbox, all of it, a range of bytes, or a range of lines.",
            files::read)
        .with("file_write", Effect::Destroys,
            "Write a file: Create or replace a file in a sandbox with the given content.",
            files::write)
        .with("file_list", Effect::Reads,
            "List a directory: Entries of a directory in a sandbox, with size, owner and permissions.",
            files::list)
        .with("file_search", Effect::Reads,
            "Find files: Files below a directory whose names match a pattern.",
            files::search)
        .with("file_replace_contents", Effect::Destroys,
            "Replace text in files: Replace every occurrence of a text in files, and return how many there were.",
            files::replace_contents)
        .with("file_move", Effect::Destroys,
            "Move files: Move or rename files and directories in a sandbox; never replaces what is there.",
            files::relocate)
        .with("file_delete", Effect::Destroys,
            "Delete files: Remove files in a sandbox; one that does not exist is no error.",
            files::delete)
        .with("file_create_directories", Effect::Sets,
            "Make directories: Create directories in a sandbox, with their parents; one that exists is no error.",
            files::create_directories)
        .with("file_delete_directories", Effect::Destroys,
            "Delete directories: Remove directories in a sandbox with everything in them.",
            files::delete_directories)
    }

    fn snapshots(self) -> Self {
        self.with(
            "snapshot_create",
            Effect::Adds,
            "Take a snapshot: Begin to copy a running sandbox's files. snapshot_get tells when it is Ready; \
             sandbox_create restores it. Not every server can.",
            snapshots::create,
        )
        .with("snapshot_get", Effect::Reads, "Look at a snapshot: State of one snapshot.", snapshots::get)
        .with(
            "snapshot_list",
            Effect::Reads,
            "List snapshots: Snapshots that this server's key may see.",
            snapshots::list,
        )
        .with(
            "snapshot_delete",
            Effect::Destroys,
            "Delete a snapshot: Remove a snapshot; sandboxes restored from it stay.",
            snapshots::delete,
        )
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_list_of_tools_is_as_published() {
        insta::assert_json_snapshot!("tools", Catalog::all().tools());
    }

    #[test]
    fn every_tool_of_the_published_server_is_there() {
        let ours = Catalog::all().tools();
        let names: BTreeSet<&str> = ours.iter().map(|tool| tool.name.as_ref()).collect();
        assert_eq!(names.len(), ours.len(), "no name twice");
        for name in [
            "sandbox_create",
            "sandbox_connect",
            "sandbox_kill",
            "sandbox_get_info",
            "sandbox_list",
            "sandbox_renew",
            "sandbox_get_metrics",
            "sandbox_healthcheck",
            "sandbox_get_endpoint",
            "command_run",
            "command_interrupt",
            "file_read",
            "file_write",
            "file_delete",
            "file_search",
            "file_create_directories",
            "file_delete_directories",
            "file_move",
            "file_replace_contents",
        ] {
            assert!(names.contains(name), "{name}");
        }
    }

    #[test]
    fn schemas_are_closed_objects_and_every_argument_is_described() {
        for tool in Catalog::all().tools() {
            let schema = &tool.input_schema;
            assert_eq!(schema["type"], "object", "{}", tool.name);
            assert_eq!(schema["additionalProperties"], false, "{}", tool.name);
            for (name, property) in schema["properties"].as_object().unwrap() {
                assert!(property.get("description").is_some(), "{} {name}", tool.name);
            }
            assert_eq!(tool.output_schema.as_ref().unwrap()["type"], "object", "{}", tool.name);
        }
    }

    #[test]
    fn hints_tell_what_only_reads_and_what_destroys() {
        let hints = |name: &str| Catalog::all().tool(name).unwrap().annotations.unwrap();
        let of = |name: &str| (hints(name).read_only_hint, hints(name).destructive_hint);
        assert_eq!(of("file_read"), (Some(true), Some(false)));
        assert_eq!(of("sandbox_kill"), (Some(false), Some(true)));
        assert_eq!(of("sandbox_create"), (Some(false), Some(false)));
        assert_eq!(of("command_run"), (Some(false), Some(true)));
        assert_eq!(hints("command_run").open_world_hint, Some(true));
    }
}
