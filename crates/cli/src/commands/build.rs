//! `sandglass build`: image builds and the images that they made.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::{Args, Subcommand};
use reqwest::Method;
use serde_json::{Value, json};

use crate::{
    Context,
    client::Client,
    interrupts::Interrupts,
    output::{note, relative, shortened},
    values,
    workspace::{
        build::{self, ImageBuild},
        progress::Progress,
        recipe::BuildOptions,
    },
};

/// The largest page.
const PAGE: &str = "200";

/// Build the image of a repository ahead of time, and manage builds and the images that they made
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(after_help = "\
Without --follow the build's id is printed and the build goes on by itself; with it the log goes to standard error, and the image's id
to standard output once it is there. Ctrl-C stops following, not the build. A directory of the name of a subcommand is written ./NAME.")]
pub struct Build {
    #[command(subcommand)]
    action: Option<Action>,
    #[command(flatten)]
    order: Order,
}

#[derive(Args, Debug)]
struct Order {
    /// Address of a repository, or a directory inside a git working tree
    #[arg(value_name = "REPO|DIR", required = true)]
    repository: Option<String>,
    #[command(flatten)]
    build: BuildOptions,
    /// Movable name of the image
    #[arg(long, value_name = "TAG")]
    tag: Option<String>,
    /// Build even if there is an image, or the last build just failed
    #[arg(long)]
    force: bool,
    /// Give the build up after this time
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    timeout: Option<Duration>,
    /// Metadata; may be repeated
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = values::pair)]
    label: Vec<(String, String)>,
    /// Show the log and wait for the end
    #[arg(short, long)]
    follow: bool,
}

#[derive(Subcommand, Debug)]
enum Action {
    /// List builds, newest first
    #[command(visible_alias = "list")]
    Ls {
        /// Only builds in this state, e.g. Running; may be repeated
        #[arg(long, value_name = "STATE")]
        state: Vec<String>,
        /// Print full ids only
        #[arg(short, long)]
        quiet: bool,
    },
    /// Show everything about a build
    Inspect {
        /// Id, or unique id prefix
        id: String,
    },
    /// Print the log of a build
    Logs {
        /// Id, or unique id prefix
        id: String,
        /// Go on until the build ends; then exit as it did
        #[arg(short, long)]
        follow: bool,
        /// Only this step: resolve, clone, build, setup, sanitize or export
        #[arg(long, conflicts_with = "follow")]
        step: Option<String>,
        /// Only so many lines from the end
        #[arg(long, value_name = "LINES", conflicts_with = "follow")]
        tail: Option<u32>,
    },
    /// Stop builds
    Cancel {
        /// Ids, or unique id prefixes
        #[arg(required = true, value_name = "ID")]
        ids: Vec<String>,
    },
    /// List the images that builds made
    Images {
        /// Print full ids only
        #[arg(short, long)]
        quiet: bool,
    },
    /// Remove images that builds made
    Rm {
        /// Ids, or unique id prefixes
        #[arg(required = true, value_name = "IMAGE")]
        images: Vec<String>,
        /// Also those that sandboxes use: they are given to no new one, and go with the last
        #[arg(short, long)]
        force: bool,
    },
}

impl Build {
    pub async fn run(self, context: &Context) -> Result<u8> {
        match self.action {
            None => self.order.run(context).await,
            Some(Action::Ls { state, quiet }) => list(context, &state, quiet).await,
            Some(Action::Inspect { id }) => {
                let id = resolve(&context.client, BUILDS, &id).await?;
                context.output.json(&build::get(&context.client, &id).await?.0)?;
                Ok(0)
            }
            Some(Action::Logs { id, follow: true, .. }) => follow_log(context, &id).await,
            Some(Action::Logs { id, step, tail, .. }) => log(context, &id, step, tail).await,
            Some(Action::Cancel { ids }) => {
                let mut cancelled = Vec::new();
                for id in &ids {
                    let id = resolve(&context.client, BUILDS, id).await?;
                    context
                        .client
                        .send(context.client.request(Method::DELETE, &["image-builds", &id])?)
                        .await?;
                    cancelled.push(id);
                }
                told(context, &cancelled)
            }
            Some(Action::Images { quiet }) => images(context, quiet).await,
            Some(Action::Rm { images, force }) => {
                let mut removed = Vec::new();
                for id in &images {
                    let id = resolve(&context.client, IMAGES, id).await?;
                    let request = context.client.request(Method::DELETE, &["images", &id])?;
                    context.client.send(request.query(&[("force", force.to_string())])).await?;
                    removed.push(id);
                }
                told(context, &removed)
            }
        }
    }
}

impl Order {
    async fn run(self, context: &Context) -> Result<u8> {
        let client = &context.client;
        let body = self.request(|name| std::env::var(name).ok())?;
        let build = ImageBuild(client.call(Method::POST, &["image-builds"], Some(&body)).await?);
        let cached = build.0.pointer("/cache/hit").and_then(Value::as_bool).unwrap_or_default();
        if cached {
            note("there is an image already; --force builds a new one");
        } else if build.0.get("deduplicated").and_then(Value::as_bool).unwrap_or_default() {
            note("joined a build that is under way");
        }
        if cached || !self.follow {
            let id = if cached { build.image_id() } else { build.id() };
            return shown(context, &build, id);
        }
        let progress = Progress::start();
        progress.line(&format!("build {}", build.id()));
        let mut interrupts = Interrupts::listen()?;
        progress.doing("waiting for the build");
        let show = |lines: &[String]| {
            lines.iter().for_each(|line| progress.line(line));
            Ok(())
        };
        let ended = build::follow(client, build.id(), show, &mut interrupts).await?;
        let ended = match ended {
            Ok(ended) => ended,
            Err(interrupt) => {
                drop(progress);
                note(&format!("the build goes on; `sandglass build cancel {}` stops it", build.id()));
                return Ok(interrupt.exit_code());
            }
        };
        ended.steps().iter().for_each(|line| progress.line(line));
        drop(progress);
        ensure!(ended.succeeded(), "the build has no image: {}", ended.why());
        shown(context, &ended, ended.image_id())
    }

    fn request(&self, variable: impl Fn(&str) -> Option<String> + Copy) -> Result<Value> {
        let source = self.build.source(self.repository.as_deref().unwrap_or("."))?;
        let mut body = json!({ "repository": self.build.repository(&source, variable)? });
        let members = [
            ("recipe", self.build.recipe.clone()),
            ("secrets", self.build.secrets(variable)?),
            ("tag", self.tag.as_ref().map(|tag| json!(tag))),
            ("force", self.force.then_some(json!(true))),
            ("timeoutSeconds", self.timeout.map(|timeout| json!(timeout.as_secs()))),
            ("metadata", (!self.label.is_empty()).then(|| self.label.iter().cloned().collect())),
        ];
        for (name, value) in members {
            if let Some(value) = value {
                body[name] = value;
            }
        }
        Ok(body)
    }
}

fn shown(context: &Context, build: &ImageBuild, id: &str) -> Result<u8> {
    if context.output.is_json() {
        context.output.json(&build.0)?;
    } else {
        context.output.line(id)?;
    }
    Ok(0)
}

fn told(context: &Context, ids: &[String]) -> Result<u8> {
    if context.output.is_json() {
        context.output.json(&ids)?;
    } else {
        context.output.text(&ids.join("\n"))?;
    }
    Ok(0)
}

/// A list that ids can be looked up in.
#[derive(Clone, Copy)]
struct List {
    path: &'static str,
    query: &'static [(&'static str, &'static str)],
    /// What its members are called.
    noun: &'static str,
}

const BUILDS: List = List { path: "image-builds", query: &[], noun: "build" };
const IMAGES: List = List { path: "images", query: &[("kind", "built")], noun: "image that a build made" };

async fn page(client: &Client, list: List, states: &[String]) -> Result<Vec<Value>> {
    let mut query = vec![("pageSize", PAGE.to_owned())];
    query.extend(list.query.iter().map(|(name, value)| (*name, (*value).to_owned())));
    query.extend(states.iter().map(|state| ("state", state.clone())));
    let mut answer = client.page(&[list.path], &query).await?;
    Ok(answer.get_mut("items").and_then(Value::as_array_mut).map(std::mem::take).unwrap_or_default())
}

fn id_of(item: &Value) -> &str {
    item.get("id").and_then(Value::as_str).unwrap_or_default()
}

/// The full id of a member of the list, given by it or by a unique prefix.
async fn resolve(client: &Client, list: List, reference: &str) -> Result<String> {
    if reference.len() == 36 {
        return Ok(reference.to_owned());
    }
    ensure!(!reference.is_empty(), "an empty string names no {}", list.noun);
    let all = page(client, list, &[]).await?;
    let found: Vec<&str> = all.iter().map(id_of).filter(|id| id.starts_with(reference)).collect();
    match found.as_slice() {
        [one] => Ok((*one).to_owned()),
        [] => bail!("there is no {} `{reference}` among the newest {PAGE}", list.noun),
        several => bail!("`{reference}` could be any of {} of them: {}", several.len(), several.join(", ")),
    }
}

async fn list(context: &Context, states: &[String], quiet: bool) -> Result<u8> {
    let items = page(&context.client, BUILDS, states).await?;
    if quiet {
        return told(context, &items.iter().map(|item| id_of(item).to_owned()).collect::<Vec<_>>());
    }
    if context.output.is_json() {
        context.output.json(&items)?;
        return Ok(0);
    }
    let now = jiff::Timestamp::now();
    let rows: Vec<_> = items.into_iter().map(|item| row(&ImageBuild(item), now)).collect();
    context
        .output
        .table(&["ID", "REPOSITORY", "REF", "COMMIT", "RECIPE", "STATE", "REASON", "CREATED"], &rows)?;
    Ok(0)
}

fn row(build: &ImageBuild, now: jiff::Timestamp) -> Vec<String> {
    let commit = build.cell("/repository/commit");
    vec![
        build.id().to_owned(),
        shortened(&build.cell("/repository/url"), 50),
        shortened(&build.cell("/repository/ref"), 20),
        commit.get(..12).unwrap_or(&commit).to_owned(),
        build.cell("/recipe"),
        build.state().to_owned(),
        build.cell("/status/reason"),
        relative(&build.cell("/createdAt"), now),
    ]
}

async fn images(context: &Context, quiet: bool) -> Result<u8> {
    let items = page(&context.client, IMAGES, &[]).await?;
    if quiet {
        return told(context, &items.iter().map(|item| id_of(item).to_owned()).collect::<Vec<_>>());
    }
    if context.output.is_json() {
        context.output.json(&items)?;
        return Ok(0);
    }
    let now = jiff::Timestamp::now();
    let rows: Vec<_> = items.iter().map(|item| image_row(item, now)).collect();
    context
        .output
        .table(&["ID", "REPOSITORY", "COMMIT", "TAGS", "STATE", "SANDBOXES", "SIZE", "USED"], &rows)?;
    Ok(0)
}

fn image_row(image: &Value, now: jiff::Timestamp) -> Vec<String> {
    let text = |name: &str| image.get(name).and_then(Value::as_str).unwrap_or("-").to_owned();
    let number = |name: &str| image.get(name).and_then(Value::as_u64).unwrap_or_default();
    let commits = image.get("commits").and_then(Value::as_object).into_iter().flatten();
    let commits: Vec<&str> = commits.filter_map(|(_, commit)| commit.as_str()?.get(..12)).collect();
    let tags = image.get("tags").and_then(Value::as_array).into_iter().flatten();
    let tags: Vec<&str> = tags.filter_map(Value::as_str).collect();
    let or_dash = |list: &[&str]| if list.is_empty() { "-".to_owned() } else { list.join(",") };
    vec![
        text("id"),
        shortened(&text("repositoryKey"), 50),
        or_dash(&commits),
        or_dash(&tags),
        text("state"),
        number("sandboxCount").to_string(),
        indicatif::HumanBytes(number("sizeBytes")).to_string(),
        relative(&text("lastUsedAt"), now),
    ]
}

async fn log(context: &Context, id: &str, step: Option<String>, tail: Option<u32>) -> Result<u8> {
    let id = resolve(&context.client, BUILDS, id).await?;
    let mut query: Vec<(&str, String)> = step.map(|step| ("step", step)).into_iter().collect();
    query.extend(tail.map(|lines| ("tail", lines.to_string())));
    context.output.text(&context.client.text(&["image-builds", &id, "logs"], &query).await?)?;
    Ok(0)
}

/// The log on standard output, and then the exit code of the build.
async fn follow_log(context: &Context, id: &str) -> Result<u8> {
    let id = resolve(&context.client, BUILDS, id).await?;
    let mut interrupts = Interrupts::listen()?;
    let show = |lines: &[String]| context.output.text(&lines.join("\n"));
    let build = match build::follow(&context.client, &id, show, &mut interrupts).await? {
        Ok(build) => build,
        Err(interrupt) => return Ok(interrupt.exit_code()),
    };
    ensure!(build.succeeded(), "the build has no image: {}", build.why());
    Ok(0)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        build: Build,
    }

    fn build(words: &[&str]) -> Result<Build, clap::Error> {
        Line::try_parse_from(["build"].iter().chain(words)).map(|line| line.build)
    }

    #[test]
    fn a_repository_or_a_subcommand() {
        let order =
            build(&["https://h/a#v1", "--tag", "latest", "--force", "--timeout", "10m", "--label", "k=v"])
                .unwrap()
                .order;
        let expected = json!({ "repository": { "url": "https://h/a", "ref": "v1" }, "tag": "latest", "force": true,
                               "timeoutSeconds": 600, "metadata": { "k": "v" } });
        assert_eq!(order.request(|_| None).unwrap(), expected);
        assert!(matches!(build(&["ls", "-q"]).unwrap().action, Some(Action::Ls { quiet: true, .. })));
        assert!(matches!(build(&["rm", "-f", "i"]).unwrap().action, Some(Action::Rm { force: true, .. })));
        assert!(build(&[]).is_err() && build(&["logs", "b", "--follow", "--tail", "3"]).is_err());
    }

    #[test]
    fn rows_are_short() {
        let now = "2030-01-01T00:00:00Z".parse().unwrap();
        let item = json!({ "id": "b", "repository": { "url": "https://h/a", "ref": "main", "commit": "0123456789abcdef" },
                           "recipe": "none", "status": { "state": "Succeeded" }, "createdAt": "2029-12-31T23:59:50Z" });
        let expected = ["b", "https://h/a", "main", "0123456789ab", "none", "Succeeded", "-", "10s ago"];
        assert_eq!(row(&ImageBuild(item), now), expected);
        let image = json!({ "id": "i", "repositoryKey": "h/a", "commits": { "/workspace/a": "0123456789abcdef" }, "tags": [],
                            "state": "Ready", "sandboxCount": 2, "sizeBytes": 1024, "lastUsedAt": "2029-12-31T23:59:50Z" });
        let expected = ["i", "h/a", "0123456789ab", "-", "Ready", "2", "1.00 KiB", "10s ago"];
        assert_eq!(image_row(&image, now), expected);
    }
}
